"""The forward pass, with one program for a block of rows or for a part of its keys."""

import triton
import triton.language as tl

from ._loads import (
    INFINITY,
    LN2,
    LOG2E,
    add_bias,
    are_kept,
    are_legal,
    are_visible,
    bias_of_rows,
    block_of_program,
    hash_rows,
    indices_of,
    load_rows,
    load_span,
    load_tile,
    locate,
    multiply,
    tanh,
)


@triton.jit
def forward_kernel(
    q, k, v, bounds, ranges, out, lse, bias, sinks, seeds, q_index, k_index,
    scale, softcap, threshold, kept_scale, q_len, k_len, runs, blocks, kv_heads, reach,
    q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s, out_b, out_h, out_s, lse_b, lse_h,
    bounds_b, bounds_h, ranges_b, ranges_h, bias_b, bias_h, bias_s, q_index_b, k_index_b, out_part, lse_part,
    described_k, described_v, table, table_b, pages, step, order,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr, SOFTCAP: tl.constexpr,
    BIAS: tl.constexpr, SINKS: tl.constexpr, DROPOUT: tl.constexpr, Q_INDEX: tl.constexpr,
    K_INDEX: tl.constexpr, PRECISION: tl.constexpr, SPECIALIZED: tl.constexpr,
    PAGE: tl.constexpr,
):  # fmt: skip
    """Compute out and lse of a block of rows.

    ``described_k`` and ``described_v`` are descriptors of k and v, or None. With PAGE, k and v are pages of
    PAGE keys, in the order of ``table`` (B, pages of a batch element).
    """
    block, plane = block_of_program(order, blocks, kv_heads, ranges_b, ranges_h)
    batch, kv_head, query, head, inside = locate(block, plane, kv_heads, q_len, GROUP, BLOCK_M)
    spans = bounds + batch * bounds_b + head * bounds_h + query * runs * 2
    of_ranges = ranges + ((batch * ranges_b + kv_head * ranges_h) * blocks + block) * runs * 4
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    rows = load_rows(q + batch * q_b, head * q_h + query * q_s, 1, d, inside, D)
    keys, values = k + batch * k_b + kv_head * k_h, v + batch * v_b + kv_head * v_h
    of_table = table
    if PAGE > 0:
        of_table = table + batch * table_b
    of_rows = bias_of_rows(bias, bias_b, bias_h, bias_s, batch, head, query, inside, BIAS)
    q_at = indices_of(q_index, q_index_b, batch, query, query + (k_len - q_len), inside, Q_INDEX)
    first_word, second_word = q_at, q_at
    if DROPOUT:
        first_word, second_word = hash_rows(seeds, GROUP * kv_heads, batch, head, q_at, inside)

    top = tl.full([BLOCK_M], -INFINITY, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    begin, end = 0, k_len
    if PARTS > 1:
        begin, end = part_of(of_ranges, runs, k_len, PARTS, BLOCK_N)
    for run in range(runs):
        lo, hi = load_span(spans, inside, run)
        first = tl.maximum(tl.load(of_ranges + 4 * run), begin)
        last = tl.minimum(tl.load(of_ranges + 4 * run + 1), end)
        start = first // BLOCK_N * BLOCK_N
        whole = tl.maximum(tl.cdiv(tl.load(of_ranges + 4 * run + 2), BLOCK_N) * BLOCK_N, start)
        whole = tl.minimum(whole, last)
        until = tl.minimum(tl.load(of_ranges + 4 * run + 3), last) // BLOCK_N * BLOCK_N
        until = tl.maximum(until, whole)
        # First tiles whose rows all see all keys, then the tiles before and behind them.
        for at in tl.range(whole, until, BLOCK_N, warp_specialize=SPECIALIZED):
            top, total, sums = add_tile(
                top, total, sums, rows, keys, values, described_k, described_v, of_table, pages, step,
                kv_head, k_s, v_s, at, 0,
                k_len, lo, hi, of_rows, inside,
                k_index, k_index_b, batch, q_at, reach, first_word, second_word, scale, softcap, threshold,
                kept_scale, k_len, False, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, SOFTCAP, BIAS, DROPOUT, K_INDEX,
                PRECISION, PAGE,
            )  # fmt: skip
        before = tl.cdiv(tl.maximum(whole - start, 0), BLOCK_N)
        behind = tl.cdiv(tl.maximum(last - until, 0), BLOCK_N)
        for tile in range(before + behind):
            at = tl.where(tile < before, start + tile * BLOCK_N, until + (tile - before) * BLOCK_N)
            top, total, sums = add_tile(
                top, total, sums, rows, keys, values, None, None, of_table, pages, step, kv_head, k_s, v_s,
                at, first, last, lo, hi, of_rows, inside,
                k_index, k_index_b, batch, q_at, reach, first_word, second_word, scale, softcap, threshold,
                kept_scale, k_len, True, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, SOFTCAP, BIAS, DROPOUT, K_INDEX,
                PRECISION, PAGE,
            )  # fmt: skip

    if SINKS:
        sink = tl.load(sinks + head, mask=inside, other=0) * LOG2E
        new = tl.maximum(top, sink)
        shift = tl.where(new == -INFINITY, 0.0, new)
        total = total * tl.exp2(top - shift) + tl.exp2(sink - shift)
        sums = sums * tl.exp2(top - shift)[:, None]
        top = shift
    empty = total == 0
    sums = sums / tl.where(empty, 1.0, total)[:, None]
    found = tl.where(empty, -INFINITY, (top + tl.log2(tl.where(empty, 1.0, total))) * LN2)
    legal = are_legal(spans, inside, runs, k_len, BLOCK_M)
    sums = tl.where(legal[:, None], sums, float("nan"))
    found = tl.where(legal, found, float("nan"))
    part = tl.program_id(1).to(tl.int64)
    to = out + part * out_part + batch * out_b + head * out_h + query * out_s
    tl.store(
        to[:, None] + e[None, :], sums.to(out.dtype.element_ty), mask=inside[:, None] & (e < DV)[None, :]
    )
    tl.store(lse + part * lse_part + batch * lse_b + head * lse_h + query, found, mask=inside)


@triton.jit
def add_tile(
    top, total, sums, rows, keys, values, described_k, described_v, table, pages, step, kv_head, k_s, v_s, at,
    first, last, lo, hi, of_rows, inside, k_index, k_index_b, batch, q_at, reach, first_word, second_word,
    scale, softcap, threshold, kept_scale, k_len,
    MASKED: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr, SOFTCAP: tl.constexpr, BIAS: tl.constexpr,
    DROPOUT: tl.constexpr, K_INDEX: tl.constexpr, PRECISION: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Add the keys of one more tile to the largest score and to the sums of weights and weighted values."""
    x = take_tile(
        described_k, keys, batch, kv_head, at, k_s, first, last, table, pages, step, D, BLOCK_D, BLOCK_N, PAGE
    )
    x = multiply(rows, tl.trans(x), PRECISION)
    key = at + tl.arange(0, BLOCK_N)
    k_at = indices_of(k_index, k_index_b, batch, key, key, key < k_len, K_INDEX)
    unit = scale * LOG2E
    if SOFTCAP or BIAS != 0:
        x *= scale
        if SOFTCAP:
            x = softcap * tanh(x / softcap)
        pairs = inside[:, None] & (key < k_len)[None, :]
        x = add_bias(x, of_rows[:, None], key[None, :], q_at[:, None], k_at[None, :], reach, pairs, BIAS)
        unit = LOG2E
    if MASKED:
        x = tl.where(are_visible(key, lo, hi), x, -INFINITY)
    # The unit is positive, so one multiplication and addition is left for each score.
    new = tl.maximum(top, tl.max(x, 1) * unit)
    shift = tl.where(new == -INFINITY, 0.0, new)
    weights = tl.exp2(x * unit - shift[:, None])
    factor = tl.exp2(top - shift)
    total = total * factor + tl.sum(weights, 1)
    if DROPOUT:
        kept = are_kept(first_word[:, None], second_word[:, None], k_at[None, :], threshold)
        weights = tl.where(kept, weights * kept_scale, 0.0)
    x = take_tile(
        described_v, values, batch, kv_head, at, v_s, first, last, table, pages, step, DV, BLOCK_DV, BLOCK_N,
        PAGE,
    )  # fmt: skip
    sums = sums * factor[:, None] + multiply(weights.to(x.dtype), x, PRECISION)
    return new, total, sums


@triton.jit
def take_tile(
    described, pointer, batch, kv_head, at, stride, first, last, table, pages, step, SIZE: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Load the keys or values of a tile, by their descriptor, or between two ends without one."""
    if described is None:
        column = tl.arange(0, BLOCK)
        tile = load_tile(pointer, at, stride, column, first, last, table, pages, step, SIZE, BLOCK_N, PAGE)
    else:
        tile = described.load([batch.to(tl.int32), kv_head.to(tl.int32), at, 0]).reshape(BLOCK_N, BLOCK)
    return tile


@triton.jit
def part_of(ranges, runs, k_len, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """The keys of this program's part, of equal parts of the range from the first to the last visible key."""
    first, last = k_len, 0
    for run in range(runs):
        lo, hi = tl.load(ranges + 4 * run), tl.load(ranges + 4 * run + 1)
        first = tl.where(lo < hi, tl.minimum(first, lo), first)
        last = tl.where(lo < hi, tl.maximum(last, hi), last)
    first = first // BLOCK * BLOCK
    size = tl.cdiv(tl.cdiv(tl.maximum(last - first, 0), BLOCK), PARTS) * BLOCK
    begin = first + size * tl.program_id(1)
    return begin, tl.minimum(begin + size, k_len)


@triton.jit
def merge_kernel(
    parts, part_lse, out, lse, sinks, q_len, q_heads, out_b, out_h, out_s, part_rows,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, PARTS: tl.constexpr, BLOCK_P: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Merge the softmaxes of all parts of a row. ``parts`` is float32 (PARTS, B, H, Sq, DV)."""
    row = tl.program_id(0).to(tl.int64)
    query, head, batch = row % q_len, row // q_len % q_heads, row // (q_len * q_heads)
    part, e = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_DV)
    each = tl.load(part_lse + part * part_rows + row, mask=part < PARTS, other=-INFINITY)
    top = tl.max(each, 0)
    broken = tl.max((each != each).to(tl.int32), 0) > 0
    sink = -INFINITY
    if SINKS:
        sink = tl.load(sinks + head)
        top = tl.maximum(top, sink)
    shift = tl.where(top == -INFINITY, 0.0, top)
    weights = tl.exp2((each - shift) * LOG2E)
    total = tl.sum(weights, 0) + tl.exp2((sink - shift) * LOG2E)
    empty = total == 0
    values = tl.load(
        parts + (part * part_rows + row)[:, None] * DV + e[None, :],
        mask=(part < PARTS)[:, None] & (e < DV)[None, :],
        other=0,
    )
    # A part without keys has the weight 0, and its values are 0.
    found = tl.sum(values * weights[:, None], 0) / tl.where(empty, 1.0, total)
    found = tl.where(broken, float("nan"), found)
    whole = tl.where(empty, -INFINITY, shift + tl.log2(tl.where(empty, 1.0, total)) * LN2)
    tl.store(
        out + batch * out_b + head * out_h + query * out_s + e, found.to(out.dtype.element_ty), mask=e < DV
    )
    tl.store(lse + row, tl.where(broken, float("nan"), whole))

"""The deterministic backward pass: a kernel for queries and a kernel for keys. Each sums in a fixed order.

FlashAttention-2, arXiv:2307.08691, section 3.1.2, with p = exp(x - lse) and ds = p * (dp - delta).
"""

import triton
import triton.language as tl

from ._loads import (
    ALIBI,
    DISTANCE,
    INFINITY,
    LOG2E,
    SIGNED_ALIBI,
    add_bias,
    are_kept,
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
def delta_kernel(
    dout, out, dlse, delta, q_len, heads, dout_b, dout_h, dout_s, out_b, out_h, out_s,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK: tl.constexpr, DLSE: tl.constexpr,
):  # fmt: skip
    """The sum of dout * out of each row, minus the gradient of its lse."""
    blocks = tl.cdiv(q_len, BLOCK)
    block, plane = tl.program_id(0) % blocks, (tl.program_id(0) // blocks).to(tl.int64)
    query = (block * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    batch, head, inside, e = plane // heads, plane % heads, query < q_len, tl.arange(0, BLOCK_DV)
    x = load_rows(dout + batch * dout_b + head * dout_h, query, dout_s, e, inside, DV).to(tl.float32)
    y = load_rows(out + batch * out_b + head * out_h, query, out_s, e, inside, DV).to(tl.float32)
    found = tl.sum(x * y, 1)
    if DLSE:
        found -= tl.load(dlse + plane * q_len + query, mask=inside, other=0)
    tl.store(delta + plane * q_len + query, found, mask=inside)


@triton.jit
def load_results(lse, delta, at_row, inside):
    """Load lse in units of log2, and delta. Rows that see nothing or do not exist get lse inf."""
    found = tl.load(lse + at_row, mask=inside, other=INFINITY).to(tl.float32)
    nothing = found == -INFINITY
    # The gradient of such an lse, and thus delta, may be infinite, and 0 * inf would give NaN.
    of_delta = tl.where(nothing, 0.0, tl.load(delta + at_row, mask=inside, other=0))
    return tl.where(nothing, INFINITY, found * LOG2E), of_delta


@triton.jit
def tile_gradients(
    left, right, left_values, right_values, lse, delta, of_rows, first_word, second_word, key, q_at, k_at,
    visible, pairs, scale, softcap, threshold, kept_scale, reach, MASKED: tl.constexpr,
    SOFTCAP: tl.constexpr, BIAS: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile's weights with dropout, the gradient of its scores, and of its products q * k.

    The tile is (rows, keys) or (keys, rows). For (rows, keys), ``left`` is q, ``left_values`` is the gradient
    of out, and ``right`` and ``right_values`` are k and v. For (keys, rows), the two sides are swapped. The
    arguments from ``lse`` to ``pairs`` broadcast to the tile.
    """
    x = multiply(left, tl.trans(right), PRECISION)
    unit = scale * LOG2E
    if SOFTCAP or BIAS != 0:
        x *= scale
        if SOFTCAP:
            x = tanh(x / softcap)
            slope = 1 - x * x
            x = softcap * x
        x = add_bias(x, of_rows, key, q_at, k_at, reach, pairs, BIAS)
        unit = LOG2E
    weights = tl.exp2(x * unit - lse)
    if MASKED:
        weights = tl.where(visible, weights, 0.0)
    gradient = multiply(left_values, tl.trans(right_values), PRECISION)
    dropped = weights
    if DROPOUT:
        kept = are_kept(first_word, second_word, k_at, threshold)
        gradient = tl.where(kept, gradient * kept_scale, 0.0)
        dropped = tl.where(kept, weights * kept_scale, 0.0)
    gradient = weights * (gradient - delta)
    of_products = gradient
    if SOFTCAP:
        of_products = gradient * slope
    return dropped, gradient, of_products


@triton.jit
def query_tile(
    sums, below, above, rows, row_douts, keys, values, k_s, v_s, at, first, last, lo, hi, of_lse, of_delta,
    of_rows, inside, k_index, k_index_b, batch, q_at, reach, first_word, second_word, scale, softcap,
    threshold, kept_scale, k_len, band, MASKED: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr, SOFTCAP: tl.constexpr,
    BIAS: tl.constexpr, WANT_BIAS: tl.constexpr, DROPOUT: tl.constexpr, K_INDEX: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the keys of one more tile to the gradient of the rows and to the gradient of their bias."""
    x = load_tile(keys, at, k_s, tl.arange(0, BLOCK_D), first, last, None, 0, 0, D, BLOCK_N, 0)
    y = load_tile(values, at, v_s, tl.arange(0, BLOCK_DV), first, last, None, 0, 0, DV, BLOCK_N, 0)
    key = at + tl.arange(0, BLOCK_N)
    there = key < k_len
    k_at = indices_of(k_index, k_index_b, batch, key, key, there, K_INDEX)
    visible = are_visible(key, lo, hi)
    _, gradient, of_products = tile_gradients(
        rows, x, row_douts, y, of_lse[:, None], of_delta[:, None], of_rows[:, None], first_word[:, None],
        second_word[:, None], key[None, :], q_at[:, None], k_at[None, :], visible,
        inside[:, None] & there[None, :], scale, softcap, threshold, kept_scale, reach,
        MASKED, SOFTCAP, BIAS, DROPOUT, PRECISION,
    )  # fmt: skip
    if WANT_BIAS:
        distance = k_at[None, :] - q_at[:, None]
        if BIAS == ALIBI:
            below -= tl.sum(gradient * tl.abs(distance).to(tl.float32), 1)
        elif BIAS == SIGNED_ALIBI:
            below += tl.sum(gradient * distance.to(tl.float32), 1)
        elif BIAS == DISTANCE:
            below += tl.sum(tl.where(distance <= -reach, gradient, 0.0), 1)
            above += tl.sum(tl.where((distance >= reach) & (distance > -reach), gradient, 0.0), 1)
            between = (distance > -reach) & (distance < reach) & visible
            tl.store(band[:, None] + (distance + reach), gradient, mask=between)
    return sums + multiply(of_products.to(x.dtype), x, PRECISION), below, above


@triton.jit
def query_gradients_kernel(
    dout, q, k, v, bounds, ranges, lse, delta, dq, bias, row_sums, band, seeds, q_index, k_index,
    scale, softcap, threshold, kept_scale, q_len, k_len, runs, blocks, kv_heads, reach,
    dout_b, dout_h, dout_s, q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s, dq_b, dq_h, dq_s,
    bounds_b, bounds_h, ranges_b, ranges_h, bias_b, bias_h, bias_s, q_index_b, k_index_b, order,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SOFTCAP: tl.constexpr, BIAS: tl.constexpr,
    WANT_BIAS: tl.constexpr, DROPOUT: tl.constexpr, Q_INDEX: tl.constexpr, K_INDEX: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dq, and the share of each row in the gradient of slopes or of a table by distance.

    ``row_sums`` is float32 (2, B, H, Sq). For slopes, the first part holds the row's sum. For a table, the
    parts hold the sums for distances beyond its two ends. ``band`` (B, H, Sq, 2 * reach + 1) holds the other
    distances one by one.
    """
    block, plane = block_of_program(order, blocks, kv_heads, ranges_b, ranges_h)
    batch, kv_head, query, head, inside = locate(block, plane, kv_heads, q_len, GROUP, BLOCK_M)
    spans = bounds + batch * bounds_b + head * bounds_h + query * runs * 2
    of_ranges = ranges + ((batch * ranges_b + kv_head * ranges_h) * blocks + block) * runs * 4
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    rows = load_rows(q + batch * q_b, head * q_h + query * q_s, 1, d, inside, D)
    row_douts = load_rows(dout + batch * dout_b, head * dout_h + query * dout_s, 1, e, inside, DV)
    keys, values = k + batch * k_b + kv_head * k_h, v + batch * v_b + kv_head * v_h
    of_rows = bias_of_rows(bias, bias_b, bias_h, bias_s, batch, head, query, inside, BIAS)
    q_at = indices_of(q_index, q_index_b, batch, query, query + (k_len - q_len), inside, Q_INDEX)
    first_word, second_word = q_at, q_at
    if DROPOUT:
        first_word, second_word = hash_rows(seeds, GROUP * kv_heads, batch, head, q_at, inside)
    q_heads = GROUP * kv_heads
    at_row = (batch * q_heads + head) * q_len + query
    of_lse, of_delta = load_results(lse, delta, at_row, inside)
    of_band = at_row
    if WANT_BIAS and BIAS == DISTANCE:
        of_band = band + at_row * (2 * reach + 1)
    sums = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    below = tl.zeros([BLOCK_M], tl.float32)
    above = tl.zeros([BLOCK_M], tl.float32)
    for run in range(runs):
        lo, hi = load_span(spans, inside, run)
        first, last = tl.load(of_ranges + 4 * run), tl.load(of_ranges + 4 * run + 1)
        start = first // BLOCK_N * BLOCK_N
        whole = tl.maximum(tl.cdiv(tl.load(of_ranges + 4 * run + 2), BLOCK_N) * BLOCK_N, start)
        whole = tl.minimum(whole, last)
        until = tl.maximum(tl.minimum(tl.load(of_ranges + 4 * run + 3), last) // BLOCK_N * BLOCK_N, whole)
        for at in range(whole, until, BLOCK_N):
            sums, below, above = query_tile(
                sums, below, above, rows, row_douts, keys, values, k_s, v_s, at, 0, k_len, lo, hi, of_lse,
                of_delta, of_rows, inside, k_index, k_index_b, batch, q_at, reach, first_word, second_word,
                scale, softcap, threshold, kept_scale, k_len, of_band, False, D, DV, BLOCK_D, BLOCK_DV,
                BLOCK_N, SOFTCAP, BIAS, WANT_BIAS, DROPOUT, K_INDEX, PRECISION,
            )  # fmt: skip
        before = tl.cdiv(tl.maximum(whole - start, 0), BLOCK_N)
        for tile in range(before + tl.cdiv(tl.maximum(last - until, 0), BLOCK_N)):
            at = tl.where(tile < before, start + tile * BLOCK_N, until + (tile - before) * BLOCK_N)
            sums, below, above = query_tile(
                sums, below, above, rows, row_douts, keys, values, k_s, v_s, at, first, last, lo, hi, of_lse,
                of_delta, of_rows, inside, k_index, k_index_b, batch, q_at, reach, first_word, second_word,
                scale, softcap, threshold, kept_scale, k_len, of_band, True, D, DV, BLOCK_D, BLOCK_DV,
                BLOCK_N, SOFTCAP, BIAS, WANT_BIAS, DROPOUT, K_INDEX, PRECISION,
            )  # fmt: skip
    if WANT_BIAS:
        tl.store(row_sums + at_row, below, mask=inside)
        if BIAS == DISTANCE:
            count = tl.num_programs(0) // blocks // kv_heads  # batch elements
            tl.store(row_sums + count * q_heads * q_len + at_row, above, mask=inside)
    to = dq + batch * dq_b + head * dq_h + query * dq_s
    sums = (sums * scale).to(dq.dtype.element_ty)
    tl.store(to[:, None] + d[None, :], sums, mask=inside[:, None] & (d < D)[None, :])


@triton.jit
def key_tile(
    sums_k, sums_v, keys, values, block, key, k_at, dout, q, bounds, lse, delta, bias, seeds, q_index,
    scale, softcap, threshold, kept_scale, q_len, k_len, runs, kv_heads, reach, plane,
    dout_b, dout_h, dout_s, q_b, q_h, q_s, bounds_b, bounds_h, bias_b, bias_h, bias_s, q_index_b,
    MASKED: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SOFTCAP: tl.constexpr,
    BIAS: tl.constexpr, DROPOUT: tl.constexpr, Q_INDEX: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add one more block of rows to the gradients of keys and values, in tiles (keys, rows)."""
    batch, _, query, head, inside = locate(block, plane, kv_heads, q_len, GROUP, BLOCK_M)
    visible = inside[None, :]
    if MASKED:
        spans = bounds + batch * bounds_b + head * bounds_h + query * runs * 2
        found = tl.zeros([BLOCK_N, BLOCK_M], tl.int32)
        for run in range(runs):
            lo, hi = load_span(spans, inside, run)
            found = tl.where((key[:, None] >= lo[None, :]) & (key[:, None] < hi[None, :]), 1, found)
        visible = found > 0
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    rows = load_rows(q + batch * q_b, head * q_h + query * q_s, 1, d, inside, D)
    row_douts = load_rows(dout + batch * dout_b, head * dout_h + query * dout_s, 1, e, inside, DV)
    of_rows = bias_of_rows(bias, bias_b, bias_h, bias_s, batch, head, query, inside, BIAS)
    q_at = indices_of(q_index, q_index_b, batch, query, query + (k_len - q_len), inside, Q_INDEX)
    first_word, second_word = q_at, q_at
    if DROPOUT:
        first_word, second_word = hash_rows(seeds, GROUP * kv_heads, batch, head, q_at, inside)
    of_lse, of_delta = load_results(lse, delta, (batch * GROUP * kv_heads + head) * q_len + query, inside)
    weights, _, of_products = tile_gradients(
        keys, rows, values, row_douts, of_lse[None, :], of_delta[None, :], of_rows[None, :],
        first_word[None, :], second_word[None, :], key[:, None], q_at[None, :], k_at[:, None],
        visible, inside[None, :] & (key < k_len)[:, None], scale, softcap, threshold, kept_scale, reach,
        MASKED, SOFTCAP, BIAS, DROPOUT, PRECISION,
    )  # fmt: skip
    sums_v += multiply(weights.to(row_douts.dtype), row_douts, PRECISION)
    sums_k += multiply(of_products.to(rows.dtype), rows, PRECISION)
    return sums_k, sums_v


@triton.jit
def key_gradients_kernel(
    dout, q, k, v, bounds, ranges, key_ranges, lse, delta, dk, dv, bias, seeds, q_index, k_index,
    scale, softcap, threshold, kept_scale, q_len, k_len, runs, blocks, kv_heads, reach, key_blocks,
    dout_b, dout_h, dout_s, q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s, dk_b, dk_h, dk_s, dv_b, dv_h, dv_s,
    bounds_b, bounds_h, ranges_b, ranges_h, bias_b, bias_h, bias_s, q_index_b, k_index_b, order,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SOFTCAP: tl.constexpr, BIAS: tl.constexpr,
    DROPOUT: tl.constexpr, Q_INDEX: tl.constexpr, K_INDEX: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv of a block of keys, summed over the rows of all heads that share it."""
    key_block, plane = tl.program_id(0) % key_blocks, tl.program_id(0) // key_blocks
    if order is not None:
        of_plane = (plane // kv_heads) * ranges_b + (plane % kv_heads) * ranges_h
        key_block = tl.load(order + of_plane.to(tl.int64) * key_blocks + key_block)
    batch, kv_head = (plane // kv_heads).to(tl.int64), (plane % kv_heads).to(tl.int64)
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    key = key_block * BLOCK_N + tl.arange(0, BLOCK_N)
    there = key < k_len
    far = key.to(tl.int64)
    keys = load_rows(k + batch * k_b + kv_head * k_h, far, k_s, d, there, D)
    values = load_rows(v + batch * v_b + kv_head * v_h, far, v_s, e, there, DV)
    k_at = indices_of(k_index, k_index_b, batch, key, key, there, K_INDEX)
    sums_k = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    sums_v = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    ranges_plane = batch * ranges_b + kv_head * ranges_h
    of_keys = key_ranges + (ranges_plane * key_blocks + key_block) * 4
    first, last = tl.load(of_keys), tl.load(of_keys + 1)
    whole, until = tl.load(of_keys + 2), tl.load(of_keys + 3)
    for block in range(whole, until):
        sums_k, sums_v = key_tile(
            sums_k, sums_v, keys, values, block, key, k_at, dout, q, bounds, lse, delta, bias, seeds,
            q_index, scale, softcap, threshold, kept_scale, q_len, k_len, runs, kv_heads, reach, plane,
            dout_b, dout_h, dout_s, q_b, q_h, q_s, bounds_b, bounds_h, bias_b, bias_h, bias_s, q_index_b,
            False, GROUP, D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, SOFTCAP, BIAS, DROPOUT, Q_INDEX,
            PRECISION,
        )  # fmt: skip
    before = whole - first
    for at in range(before + last - until):
        block = tl.where(at < before, first + at, until + at - before)
        of_ranges = ranges + (ranges_plane * blocks + block) * runs * 4
        seen = 0
        for run in range(runs):
            lo, hi = tl.load(of_ranges + 4 * run), tl.load(of_ranges + 4 * run + 1)
            seen = tl.where(
                (lo < hi) & (lo < (key_block + 1) * BLOCK_N) & (hi > key_block * BLOCK_N), 1, seen
            )
        if seen > 0:
            sums_k, sums_v = key_tile(
                sums_k, sums_v, keys, values, block, key, k_at, dout, q, bounds, lse, delta, bias, seeds,
                q_index, scale, softcap, threshold, kept_scale, q_len, k_len, runs, kv_heads, reach, plane,
                dout_b, dout_h, dout_s, q_b, q_h, q_s, bounds_b, bounds_h, bias_b, bias_h, bias_s, q_index_b,
                True, GROUP, D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, SOFTCAP, BIAS, DROPOUT, Q_INDEX,
                PRECISION,
            )  # fmt: skip
    to = dk + batch * dk_b + kv_head * dk_h + far * dk_s
    sums_k = (sums_k * scale).to(dk.dtype.element_ty)
    tl.store(to[:, None] + d[None, :], sums_k, mask=there[:, None] & (d < D)[None, :])
    to = dv + batch * dv_b + kv_head * dv_h + far * dv_s
    sums_v = sums_v.to(dv.dtype.element_ty)
    tl.store(to[:, None] + e[None, :], sums_v, mask=there[:, None] & (e < DV)[None, :])


@triton.jit
def bias_gradients_kernel(
    dout, q, k, v, bounds, lse, delta, bias, dbias, seeds, q_index, k_index,
    scale, softcap, threshold, kept_scale, q_len, k_len, runs, reach,
    q_heads, of_batch, of_heads, of_blocks, row_blocks, key_blocks,
    dout_b, dout_h, dout_s, q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s,
    bounds_b, bounds_h, bias_b, bias_h, bias_s, dbias_b, dbias_h, dbias_s, q_index_b, k_index_b,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SOFTCAP: tl.constexpr, BIAS: tl.constexpr,
    ONE_ROW: tl.constexpr, DROPOUT: tl.constexpr, Q_INDEX: tl.constexpr, K_INDEX: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of a dense bias. A program sums a tile over all elements, heads and rows that share it.

    ``of_batch``, ``of_heads`` and ``of_blocks`` are the numbers of each that share a value.
    """
    program = tl.program_id(0)
    key_block, row_block = program % key_blocks, program // key_blocks % row_blocks
    plane = program // (key_blocks * row_blocks)
    bias_heads = q_heads // of_heads
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    key = key_block * BLOCK_N + tl.arange(0, BLOCK_N)
    there, far = key < k_len, key.to(tl.int64)
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for shared in range(of_batch * of_heads * of_blocks):
        block = row_block + shared % of_blocks
        head = (plane % bias_heads + shared // of_blocks % of_heads).to(tl.int64)
        batch = (plane // bias_heads + shared // (of_blocks * of_heads)).to(tl.int64)
        kv_head = head // GROUP
        query = (block * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
        inside = query < q_len
        spans = bounds + batch * bounds_b + head * bounds_h + query * runs * 2
        found = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
        for run in range(runs):
            lo, hi = load_span(spans, inside, run)
            found = tl.where(are_visible(key, lo, hi), 1, found)
        if tl.max(tl.max(found, 1), 0) > 0:
            keys = load_rows(k + batch * k_b + kv_head * k_h, far, k_s, d, there, D)
            values = load_rows(v + batch * v_b + kv_head * v_h, far, v_s, e, there, DV)
            rows = load_rows(q + batch * q_b + head * q_h, query, q_s, d, inside, D)
            row_douts = load_rows(dout + batch * dout_b + head * dout_h, query, dout_s, e, inside, DV)
            k_at = indices_of(k_index, k_index_b, batch, key, key, there, K_INDEX)
            q_at = indices_of(q_index, q_index_b, batch, query, query + (k_len - q_len), inside, Q_INDEX)
            of_rows = bias + batch * bias_b + head * bias_h + query * bias_s
            first_word, second_word = q_at, q_at
            heads = tl.zeros([BLOCK_M], tl.int64) + head
            if DROPOUT:
                first_word, second_word = hash_rows(seeds, q_heads, batch, heads, q_at, inside)
            at_row = (batch * q_heads + head) * q_len + query
            of_lse, of_delta = load_results(lse, delta, at_row, inside)
            _, gradient, _ = tile_gradients(
                rows, keys, row_douts, values, of_lse[:, None], of_delta[:, None], of_rows[:, None],
                first_word[:, None], second_word[:, None], key[None, :], q_at[:, None], k_at[None, :],
                found > 0, inside[:, None] & there[None, :], scale, softcap, threshold, kept_scale, reach,
                True, SOFTCAP, BIAS, DROPOUT, PRECISION,
            )  # fmt: skip
            sums += gradient
    to = dbias + (plane // bias_heads) * dbias_b + (plane % bias_heads) * dbias_h
    if ONE_ROW:
        tl.store(to + key, tl.sum(sums, 0), mask=there)
    else:
        query = (row_block * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
        pairs = (query < q_len)[:, None] & there[None, :]
        tl.store(to + (query * dbias_s)[:, None] + key[None, :], sums, mask=pairs)

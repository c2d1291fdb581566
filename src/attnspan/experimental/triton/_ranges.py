"""Keys that a block of rows sees, and rows that see a block of keys, from the ends of spans in O(S * R)."""

import triton
import triton.language as tl

from ._loads import load_span, locate


@triton.jit
def row_ranges_kernel(
    bounds,
    ranges,
    q_len,
    k_len,
    runs,
    blocks,
    kv_heads,
    stride_b,
    stride_h,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Find the keys that some rows, and that all rows, of each block see in each span.

    ``ranges`` is int32 (planes, blocks, runs, 4). Some row sees keys in [first, second). Every row sees all
    keys in [third, fourth).
    """
    program = tl.program_id(0)
    block, plane = program % blocks, program // blocks
    batch, _, query, head, inside = locate(block, plane, kv_heads, q_len, GROUP, BLOCK)
    spans = bounds + batch * stride_b + head * stride_h + query * runs * 2
    to = ranges + program.to(tl.int64) * runs * 4
    for run in range(runs):
        lo, hi = load_span(spans, inside, run)
        some = hi > lo
        first = tl.min(tl.where(some, lo, k_len), 0)
        last = tl.max(tl.where(some, hi, 0), 0)
        whole = tl.max(tl.where(inside, tl.where(some, lo, k_len), 0), 0)
        until = tl.min(tl.where(inside, tl.where(some, hi, 0), k_len), 0)
        # Illegal spans may lie outside the keys.
        tl.store(to + 4 * run, tl.maximum(first, 0))
        tl.store(to + 4 * run + 1, tl.minimum(last, k_len))
        tl.store(to + 4 * run + 2, tl.maximum(whole, 0))
        tl.store(to + 4 * run + 3, tl.minimum(until, k_len))


@triton.jit
def key_ranges_kernel(ranges, found, blocks, runs, key_blocks, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """Find the blocks of rows that see some, and that see all, keys of each block of keys in one span.

    ``found`` is int32 (planes, key blocks, 4). In the blocks of rows [first, second), some row may see a key.
    In the blocks of rows [third, fourth), every row sees every key.
    """
    program = tl.program_id(0)
    at, plane = program % key_blocks, (program // key_blocks).to(tl.int64)
    first, last, whole, until = blocks, 0, blocks, blocks
    for start in range(0, blocks, CHUNK):
        block = start + tl.arange(0, CHUNK)
        inside = block < blocks
        some = tl.zeros([CHUNK], tl.int32)
        all_of = tl.zeros([CHUNK], tl.int32)
        for run in range(runs):
            of = ranges + ((plane * blocks + block) * runs + run) * 4
            lo, hi = tl.load(of, mask=inside, other=0), tl.load(of + 1, mask=inside, other=0)
            some = tl.where((lo < hi) & (lo < (at + 1) * BLOCK) & (hi > at * BLOCK), 1, some)
            lo, hi = tl.load(of + 2, mask=inside, other=0), tl.load(of + 3, mask=inside, other=0)
            all_of = tl.where((lo <= at * BLOCK) & (hi >= (at + 1) * BLOCK), 1, all_of)
        first = tl.minimum(first, tl.min(tl.where(some > 0, block, blocks), 0))
        last = tl.maximum(last, tl.max(tl.where(some > 0, block + 1, 0), 0))
        whole = tl.minimum(whole, tl.min(tl.where(all_of > 0, block, blocks), 0))
        until = tl.minimum(until, tl.min(tl.where((all_of == 0) & (block > whole), block, blocks), 0))
    to = found + 4 * program
    tl.store(to, first)
    tl.store(to + 1, tl.maximum(last, first))
    tl.store(to + 2, tl.where(whole < last, whole, last))
    tl.store(to + 3, tl.where(whole < last, tl.minimum(until, last), last))


@triton.jit
def order_kernel(ranges, order, blocks, runs, CHUNK: tl.constexpr):
    """Sort blocks by their number of keys, largest first, so that no long block starts at the end.

    ``ranges`` is int32 (planes, blocks, runs, 4), of which the first two numbers are used. ``order`` is int32
    (planes, blocks). Each program finds the place of one block. Of equal blocks, the last goes first.
    """
    program = tl.program_id(0)
    block, plane = program % blocks, (program // blocks).to(tl.int64)
    own, rank = 0, 0
    for run in range(runs):
        of = ranges + ((plane * blocks + block) * runs + run) * 4
        own += tl.maximum(tl.load(of + 1) - tl.load(of), 0)
    for start in range(0, blocks, CHUNK):
        other = start + tl.arange(0, CHUNK)
        inside = other < blocks
        cost = tl.zeros([CHUNK], tl.int32)
        for run in range(runs):
            of = ranges + ((plane * blocks + other) * runs + run) * 4
            lo, hi = tl.load(of, mask=inside, other=0), tl.load(of + 1, mask=inside, other=0)
            cost += tl.maximum(hi - lo, 0)
        before = inside & ((cost > own) | ((cost == own) & (other > block)))
        rank += tl.sum(before.to(tl.int32), 0)
    tl.store(order + plane * blocks + rank, block)

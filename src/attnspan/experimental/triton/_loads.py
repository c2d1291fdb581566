"""Functions that all kernels share: rows and spans, scores with options, products under masks.

Row n of a key head is query n // GROUP of head n % GROUP of its group. Keys and values are therefore read
once for all heads that share them. Scores are in units of log2, for exp2.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# Kinds of bias, as in attnspan.call.options.
ALIBI, SIGNED_ALIBI, DISTANCE, DENSE = (tl.constexpr(kind) for kind in (1, 2, 3, 4))
HIDES = tl.constexpr(-2.36e38)
INFINITY = tl.constexpr(float("inf"))


@triton.jit
def locate(block, plane, kv_heads, q_len, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """Batch element, key head, and for each row of a block its query, its head and whether it exists."""
    row = block * BLOCK + tl.arange(0, BLOCK)
    batch, kv_head = (plane // kv_heads).to(tl.int64), plane % kv_heads
    query = (row // GROUP).to(tl.int64)
    return batch, kv_head.to(tl.int64), query, (kv_head * GROUP + row % GROUP).to(tl.int64), query < q_len


@triton.jit
def block_of_program(order, blocks, kv_heads, ranges_b, ranges_h):
    """A program's block of rows and its plane, in the order of `order_kernel`, or the last blocks first."""
    at, plane = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    if order is None:
        block = blocks - 1 - at
    else:
        of_plane = (plane // kv_heads) * ranges_b + (plane % kv_heads) * ranges_h
        block = tl.load(order + of_plane.to(tl.int64) * blocks + at)
    return block, plane


@triton.jit
def load_rows(pointer, rows, stride, column, inside, SIZE: tl.constexpr):
    """Load a tile (rows, columns), with 0 outside the array."""
    where = pointer + rows[:, None] * stride + column[None, :]
    return tl.load(where, mask=inside[:, None] & (column < SIZE)[None, :], other=0)


@triton.jit
def load_span(spans, inside, run):
    """Load the ends of one span of each row. Missing rows have empty spans."""
    return tl.load(spans + 2 * run, mask=inside, other=0), tl.load(spans + 2 * run + 1, mask=inside, other=0)


@triton.jit
def are_legal(spans, inside, runs, k_len, BLOCK: tl.constexpr):
    """Whether the spans of each row are ascending, disjoint and within the keys."""
    broken = tl.zeros([BLOCK], tl.int32)
    reach = tl.zeros([BLOCK], tl.int32)
    for run in range(runs):
        lo, hi = load_span(spans, inside, run)
        outside = (lo < 0) | (hi < lo) | (hi > k_len) | ((hi > lo) & (lo < reach))
        broken = tl.where(outside, 1, broken)
        reach = tl.where(hi > lo, tl.maximum(reach, hi), reach)
    return broken == 0


@triton.jit
def tanh(x):
    """tanh to float32's rounding. Near 0, the quotient of exponentials would cancel."""
    t = tl.exp(-2 * tl.abs(x))
    far = (1 - t) / (1 + t)
    s = x * x
    near = x * (1 + s * (-1 / 3 + s * (2 / 15 + s * (-17 / 315 + s * (62 / 2835 - s * (1382 / 155925))))))
    return tl.where(tl.abs(x) < 0.25, near, tl.where(x < 0, -far, far))


@triton.jit
def indices_of(index, batch_stride, batch, at, default, inside, GIVEN: tl.constexpr):
    """Global indices of queries or keys."""
    # No early returns, because Triton compiles the code after them anyway.
    if GIVEN:
        found = tl.load(index + batch * batch_stride + at, mask=inside, other=0)
    else:
        found = default.to(tl.int32)
    return found


@triton.jit
def bias_of_rows(bias, stride_b, stride_h, stride_q, batch, head, query, inside, BIAS: tl.constexpr):
    """The slope of each row, or the start of the biases of each row, by kind of bias."""
    if BIAS == 0:
        found = query
    elif BIAS == DENSE:
        found = bias + batch * stride_b + head * stride_h + query * stride_q
    elif BIAS == DISTANCE:
        found = bias + batch * stride_b + head * stride_h
    else:
        found = tl.load(bias + batch * stride_b + head * stride_h, mask=inside, other=0)
    return found


@triton.jit
def add_bias(x, of_rows, key, q_at, k_at, reach, pairs, BIAS: tl.constexpr):
    """Add the bias to scores. All arguments broadcast to the tile. ``pairs`` marks existing pairs."""
    if BIAS == ALIBI:
        x -= of_rows * tl.abs(k_at - q_at).to(tl.float32)
    elif BIAS == SIGNED_ALIBI:
        x += of_rows * (k_at - q_at).to(tl.float32)
    elif BIAS == DISTANCE:
        column = tl.minimum(tl.maximum(k_at - q_at, -reach), reach) + reach
        x += tl.load(of_rows + column, mask=pairs, other=0)
    elif BIAS == DENSE:
        given = tl.load(of_rows + key, mask=pairs, other=0).to(tl.float32)
        x += tl.where(given < HIDES, -INFINITY, given)
    return x


@triton.jit
def hash_rows(seeds, q_heads, batch, head, q_at, inside):
    """Two words of dropout for each row. attnspan.call.dropout has the algorithm."""
    seed = tl.load(seeds + batch * q_heads + head, mask=inside, other=0)
    zero = tl.zeros_like(q_at).to(tl.uint32)
    first, second, _, _ = tl.philox(
        seed.to(tl.uint64, bitcast=True), q_at.to(tl.uint32, bitcast=True), zero, zero, zero
    )
    return first, second


@triton.jit
def are_kept(first, second, k_at, threshold):
    """Return whether dropout keeps each weight. The arguments broadcast to the tile."""
    key = k_at.to(tl.uint32, bitcast=True)
    x = (((key >> 5) << 4) | (key & 15)) ^ first
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) + second
    x = x * 0x846CA68B
    x = x ^ (x >> 16)
    return ((x >> (((key >> 4) & 1) << 4)) & 0xFFFF) >= threshold


@triton.jit
def load_tile(
    pointer, at, stride, column, first, last, table, pages, step, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
):  # fmt: skip
    """Load the keys or values of a tile. Keys outside [``first``, ``last``), which no row sees, are 0.

    With PAGE, keys are in pages of PAGE keys, ``step`` rows apart, and ``table`` lists the pages of a batch
    element. A page number below 0, or from ``pages`` on, gives NaN.
    """
    key = at + tl.arange(0, BLOCK)
    seen = (key >= first) & (key < last)
    if PAGE == 0:
        tile = load_rows(pointer, key.to(tl.int64), stride, column, seen, SIZE)
    else:
        page = tl.load(table + key // PAGE, mask=seen, other=0).to(tl.int64)
        known = (page >= 0) & (page < pages)
        tile = load_rows(pointer, page * step + key % PAGE, stride, column, seen & known, SIZE)
        tile = tl.where(known[:, None], tile, float("nan")).to(pointer.dtype.element_ty)
    return tile


@triton.jit
def are_visible(key, lo, hi):
    """Return whether one span of each row shows each pair."""
    return (key[None, :] >= lo[:, None]) & (key[None, :] < hi[:, None])


@triton.jit
def multiply(a, b, PRECISION: tl.constexpr):
    """The matrix product in float32."""
    if PRECISION == "widened":  # Triton's interpreter multiplies the bits of bfloat16 as numbers
        found = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        found = tl.dot(a, b, input_precision=PRECISION)
    return found

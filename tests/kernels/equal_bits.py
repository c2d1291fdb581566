"""Runs the forward pass on 1, 2, 3 and 5 threads and compares bits: a program, which test_equal_bits.py runs.

With NumPy alone, because six processes that load torch would take longer than what they test.
"""

import itertools
import os
import sys
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

from attnspan.call.options import ALIBI, DENSE, Options
from attnspan.kernels import cpu

THREADS = (1, 2, 3, 5)
QUERIES, KEYS = (1, 5, 16, 17, 200), (1, 2048, 9000)
DTYPES = (np.dtype("float32"), np.dtype(ml_dtypes.bfloat16), np.dtype("float16"))
MASKS = ("full", "causal", "documents", "window", "two spans")
HEADS = ((1, 1), (2, 1), (1, 2), (3, 1))  # key heads, and query heads of each
OPTIONS = ("plain", "all", "softcap", "alibi", "dropout", "sinks", "dense", "softcap, alibi")
DIM = 16


def bounds_of(mask: str, q_len: int, k_len: int) -> np.ndarray:
    """Spans (1, 1, q_len, R, 2): "two spans" has R of 2, and rows that see nothing."""
    rows = np.arange(q_len)
    ends = np.clip(rows + 1 + k_len - q_len, 0, k_len)
    if mask == "full":
        spans = [(0 * rows, 0 * rows + k_len)]
    elif mask == "causal":
        spans = [(0 * rows, ends)]
    elif mask == "documents":
        spans = [(np.maximum(ends - 1, 0) // 700 * 700, ends)]
    elif mask == "window":
        spans = [(np.maximum(ends - 300, 0), ends)]
    else:
        spans = [(0 * rows, np.minimum(ends, 40)), (np.minimum(ends, 40), ends - (ends > 100) * 50)]
        spans = [(lo, np.where(rows % 7 == 3, lo, hi)) for lo, hi in spans]
    return np.ascontiguousarray(np.stack([np.stack(span, -1) for span in spans], 1)[None, None], np.int32)


def options_of(name: str, heads: int, q_len: int, k_len: int, random: np.random.Generator) -> Options:
    """The named options; "all" are all that go together."""
    given: dict[str, Any] = {}
    if "softcap" in name or name == "all":
        given["softcap"] = 3.0
    if "alibi" in name:
        given |= {"bias": np.full((1, heads), 0.01, "float32"), "bias_kind": ALIBI}
    if name in ("dense", "all"):
        given |= {"bias": random.standard_normal((1, 1, q_len, k_len), "float32"), "bias_kind": DENSE}
    if name in ("dropout", "all"):
        given |= {"dropout_p": 0.3, "dropout_seed": np.array(11)}
    if name in ("sinks", "all"):
        given["sinks"] = random.standard_normal(heads, "float32")
    return Options(**given)


def normal(random: np.random.Generator, dtype: np.dtype, *shape: int) -> np.ndarray:
    return random.standard_normal(shape, "float32").astype(dtype)


def digits(q: Any, k: Any, v: Any, bounds: Any, options: Options, threads: int) -> tuple[bytes, bytes]:
    """The bytes of out and lse, which are NaN before the kernel writes them."""
    out, lse = np.full(q.shape, np.nan, q.dtype), np.full(q.shape[:3], np.nan, "float32")
    cpu.forward(q, k, v, bounds, out, lse, scale=0.25, num_threads=threads, options=options)
    assert not np.isnan(lse).any()
    return out.tobytes(), lse.tobytes()


def cells(thorough: bool) -> Iterator[tuple[int, int, np.dtype, str, str, tuple[int, int]]]:
    """Every length, dtype, "plain" and "all" meet; masks, heads and single options take turns."""
    turn = itertools.count()
    for q_len, k_len, dtype in itertools.product(QUERIES, KEYS, DTYPES):
        if thorough:
            for options, mask, heads in itertools.product(OPTIONS, MASKS, HEADS):
                yield q_len, k_len, dtype, options, mask, heads
            continue
        for options in ("plain", "plain", "all", OPTIONS[2 + next(turn) % (len(OPTIONS) - 2)]):
            n = next(turn)
            yield q_len, k_len, dtype, options, MASKS[n % len(MASKS)], HEADS[n // 2 % len(HEADS)]


def main() -> None:
    """Print how many cells there were, or which one differs."""
    random, ran = np.random.default_rng(0), 0
    for q_len, k_len, dtype, name, mask, (kv_heads, group) in cells(
        os.environ.get("ATTNSPAN_THOROUGH") == "1"
    ):
        heads = kv_heads * group
        q = normal(random, dtype, 1, heads, q_len, DIM)
        k, v = (normal(random, dtype, 1, kv_heads, k_len, DIM) for _ in range(2))
        # A key whose products are beyond what needs no maximum: who meets it computes in another way.
        k[:, :, k_len * 2 // 3] *= 40
        if ran % 4 == 3:
            v[:, :, k_len // 3] = np.inf  # and another one is exact, row by row
        bounds, options = bounds_of(mask, q_len, k_len), options_of(name, heads, q_len, k_len, random)
        first = digits(q, k, v, bounds, options, THREADS[0])
        for threads in THREADS[1:]:
            if digits(q, k, v, bounds, options, threads) != first:
                cell = f"{q_len} x {k_len}, {dtype}, {name}, {mask}, {kv_heads} x {group} heads"
                sys.exit(f"{threads} threads differ: {cell}")
        ran += 1
    print(cpu.isa(), ran)


if __name__ == "__main__":
    main()

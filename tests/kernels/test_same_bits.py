"""A row has the same bits packed, alone, padded, in chunks over a cache, and on any number of threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_run import forward
from samples.problems import Case, make
from torch import Tensor

from attnspan.kernels import cpu

pytestmark = pytest.mark.compiled_module("bits are those of this machine's kernel")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def spans(mask: str, q_len: int, k_len: int, first_key: int = 0) -> np.ndarray:
    """Spans (q_len, 2) of one document whose keys start at `first_key`; the rows are its last ones."""
    rows = np.arange(k_len - q_len, k_len)
    lo = np.maximum(rows - 40, 0) if mask == "window" else np.zeros_like(rows)
    hi = np.full_like(rows, k_len) if mask in ("full", "late") else rows + 1
    if mask == "late":  # the first row sees less than those after it
        lo[0] = min(2, k_len - 1)
    return (np.stack([lo, hi], -1) + first_key).astype(np.int32)


def run(given: dict[str, Tensor], bounds: np.ndarray, threads: int, backward: bool) -> dict[str, Tensor]:
    """All results; NaN before the kernel writes them."""
    q, k, v, dout = (given[name] for name in ("q", "k", "v", "dout"))
    out, lse = torch.full_like(dout, torch.nan), torch.full(q.shape[:3], torch.nan)
    call: dict[str, Any] = {"scale": 0.3, "num_threads": threads}
    shaped = torch.from_numpy(np.ascontiguousarray(bounds[None, None, :, None]))
    cpu.forward(q, k, v, shaped, out, lse, **call)
    found = {"out": out, "lse": lse}
    if backward:
        gradients = {name: torch.full_like(given[name], torch.nan) for name in ("q", "k", "v")}
        cpu.backward(dout, None, q, k, v, out, lse, shaped, *gradients.values(), **call)
        found |= {f"d{name}": x for name, x in gradients.items()}
    return found


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, x in expected.items():
        assert not x.isnan().any(), name
        assert torch.equal(got[name], x), name


def part(given: dict[str, Tensor], rows: slice, keys: slice) -> dict[str, Tensor]:
    kept = {"q": rows, "dout": rows, "out": rows, "lse": rows, "dq": rows}
    return {name: x[:, :, kept.get(name, keys)] for name, x in given.items()}


problems = {
    "mask": st.sampled_from(["causal", "full", "window", "late"]),
    "dtype": st.sampled_from(list(DTYPES)),
    "dims": st.sampled_from([(64, 64), (32, 96), (20, 7), (128, 128)]),
    "heads": st.sampled_from([(1, 1), (2, 1), (4, 2)]),
    "threads": st.sampled_from([1, 2, 3, 5]),
    "seed": st.integers(0, 2**20),
}


def numbers(
    length: int, dtype: str, dims: tuple[int, int], heads: tuple[int, int], seed: int
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    (dim, v_dim), (q_heads, kv_heads) = dims, heads
    shapes = {"q": (q_heads, dim), "k": (kv_heads, dim), "v": (kv_heads, v_dim), "dout": (q_heads, v_dim)}
    drawn = {n: torch.randn(1, h, length, d, generator=generator) for n, (h, d) in shapes.items()}
    # Some rows need a maximum, which others next to them do not.
    drawn["k"][:, :, ::37] *= 30
    return {name: x.to(DTYPES[dtype]) for name, x in drawn.items()}


@given(
    lengths=st.lists(st.sampled_from([1, 2, 5, 16, 17, 31, 33, 96, 129, 300, 800]), min_size=1, max_size=4),
    **problems,
)
def test_packed_or_alone(lengths: list[int], mask: str, threads: int, **problem: Any) -> None:
    """Each document, between others, has the results that it has by itself on one thread."""
    inputs = numbers(sum(lengths), **problem)
    starts = np.cumsum([0, *lengths])
    bounds = np.concatenate([spans(mask, n, n, at) for n, at in zip(lengths, starts, strict=False)])
    packed = run(inputs, bounds, threads, backward=True)
    for n, at in zip(lengths, starts, strict=False):
        own = slice(at, at + n)
        alone = run(part(inputs, own, own), spans(mask, n, n), 1, backward=True)
        assert_same(part(packed, own, own), alone)


@given(before=st.integers(0, 70), after=st.integers(0, 70), length=st.integers(1, 400), **problems)
def test_padding(before: int, after: int, length: int, mask: str, threads: int, **problem: Any) -> None:
    """Rows without visible keys and keys without queries do not change other rows; their gradients are 0."""
    inputs, own = numbers(before + length + after, **problem), slice(before, before + length)
    bounds = np.zeros((before + length + after, 2), np.int32)
    bounds[own] = spans(mask, length, length, before)
    padded = run(inputs, bounds, threads, backward=True)
    assert_same(
        part(padded, own, own), run(part(inputs, own, own), spans(mask, length, length), 1, backward=True)
    )
    for name in ("out", "dq", "dk", "dv"):
        assert not padded[name][:, :, :before].any(), name
        assert not padded[name][:, :, before + length :].any(), name


@given(length=st.integers(2, 1500), chunk=st.sampled_from([1, 2, 4, 7, 16, 17, 64, 200]), **problems)
def test_chunks_with_a_cache(length: int, chunk: int, mask: str, threads: int, **problem: Any) -> None:
    """The last rows of a causal sequence, computed by themselves over all of its keys."""
    chunk, mask = min(chunk, length), "full" if mask in ("full", "late") else "causal"
    inputs, last = numbers(length, **problem), slice(length - chunk, length)
    whole = run(inputs, spans(mask, length, length), 1, backward=False)
    alone = run(part(inputs, last, slice(None)), spans(mask, chunk, length), threads, backward=False)
    assert_same(part(whole, last, slice(None)), alone)


#: (queries, query heads of a key head, keys): all counts of rows that are worked on together, and one more;
#: keys that end anywhere in a step of 32.
FEW = [
    (1, 1, 33), (2, 1, 47), (3, 1, 48), (4, 1, 49), (5, 1, 50), (3, 2, 62), (7, 1, 63), (8, 1, 64),
    (3, 3, 65), (5, 3, 1057), (16, 1, 79), (13, 2, 90), (11, 3, 80), (16, 2, 81), (13, 5, 95), (16, 4, 97),
    (16, 9, 129),
]  # fmt: skip


@pytest.mark.parametrize("dims", [(64, 64), (96, 80), (72, 40), (576, 512)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("queries", "group", "length"), FEW)
def test_few_queries_of_many_heads(
    queries: int, group: int, length: int, dtype: str, dims: tuple[int, int]
) -> None:
    """Few rows of a key head read keys as they lie, in two layouts; many read packed blocks."""
    inputs, last = numbers(length, dtype, dims, (group, 1), 5), slice(length - queries, length)
    whole = run(inputs, spans("full", length, length), 1, backward=False)
    expected = part(whole, last, slice(None))
    few = part(inputs, last, slice(None))
    assert_same(run(few, spans("full", queries, length), 2, backward=False), expected)
    apart = {name: torch.stack([x, x], 3)[:, :, :, 1] for name, x in few.items()}
    assert_same(run(apart, spans("full", queries, length), 1, backward=False), expected)


@given(length=st.integers(1, 1200), **problems)
def test_threads(length: int, mask: str, threads: int, **problem: Any) -> None:
    inputs, bounds = numbers(length, **problem), spans(mask, length, length)
    assert_same(run(inputs, bounds, threads, backward=True), run(inputs, bounds, 1, backward=True))


#: Key heads, query heads of each, and a factor of one value: where that is infinite, another one is exact.
HEADS = [(1, 1, 1.0), (2, 1, np.inf), (1, 2, 1.0), (3, 1, np.inf)]
OPTIONS = [(), ("softcap",), ("alibi",), ("sinks",), ("dropout",), ("dense, float32",)]
OPTIONS += [("softcap", "alibi"), ("softcap", "sinks", "dropout", "dense, one for all, float32")]


@pytest.mark.parametrize("q_len", [1, 5, 17, 200])
@pytest.mark.covering(1)
@pytest.mark.parametrize("k_len", [1, 2048, 9000])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", ["full", "causal", "documents of 700", "window of 300", "random"])
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_threads_under_options(q_len, k_len, dtype, mask, heads, options):
    kv_heads, group, factor = heads
    sizes = {"heads": kv_heads * group, "kv_heads": kv_heads, "head_dim": 16, "v_dim": 16, "runs": 2}
    problem = make(Case(options, mask, DTYPES[dtype], q_len=q_len, k_len=k_len, **sizes))
    # A key whose products are beyond what needs no maximum: who meets it computes in another way.
    problem.k[:, :, k_len * 2 // 3] *= 40
    problem.v[:, :, k_len // 3] *= factor
    first = forward(problem, threads=1)
    for threads in (2, 3, 5):
        for name, x, other in zip(("out", "lse"), first, forward(problem, threads), strict=True):
            assert torch.equal(x.nan_to_num(7.0), other.nan_to_num(7.0)), name


@pytest.mark.parametrize("q_len", [3, 200])
def test_a_configuration_of_threads_changes_no_bit(q_len: int) -> None:
    problem = make(Case(heads=1, kv_heads=1, q_len=q_len, k_len=4096, head_dim=16, v_dim=16, mask="full"))
    problem.k[0, 0, 4000] *= 40
    first, *others = (
        forward(problem, 5, config={"block_q": 0, "block_k": 0, "threads": threads}) for threads in (0, 1, 3)
    )
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(other, first, strict=True))

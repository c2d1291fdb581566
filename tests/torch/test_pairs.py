"""A function as a mask means its value for single pairs, as FlexAttention's `create_mask` has it by vmap."""

# ruff: noqa: ARG005  (functions of a fixed signature, most of which need a part of it)
from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from covering import everything
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from attnspan import Spans, causal, from_block_mask, from_predicate
from attnspan.parallel import Layout
from attnspan.torch import attention

Term = Callable[..., Any]

#: Of the arrays ids (B, N), wide (N, 3) and lengths (B,), and of the indices.
TERMS: list[Term] = [
    lambda x, b, h, q, k: q - k,
    lambda x, b, h, q, k: q.max() * 2,
    lambda x, b, h, q, k: (k + h).sum(),
    lambda x, b, h, q, k: h,
    lambda x, b, h, q, k: x["ids"][b, q],
    lambda x, b, h, q, k: x["ids"][b][k],
    lambda x, b, h, q, k: x["ids"][b].sum(),
    lambda x, b, h, q, k: x["ids"][b, k].sum(),
    lambda x, b, h, q, k: x["ids"][b].max() + q,
    lambda x, b, h, q, k: x["ids"][b].cumsum(0)[q],
    lambda x, b, h, q, k: x["ids"][0][k],
    lambda x, b, h, q, k: x["wide"][k].sum(),
    lambda x, b, h, q, k: x["wide"][k].argmax(),
    lambda x, b, h, q, k: x["wide"][:, 1][q],
    lambda x, b, h, q, k: x["lengths"][b],
    lambda x, b, h, q, k: x["lengths"][b] - x["lengths"].min(),
]
CONDITIONS: list[Term] = [
    lambda x, b, h, q, k: k <= q,
    lambda x, b, h, q, k: k < x["lengths"][b],
    lambda x, b, h, q, k: (x["wide"][k] == 1).any(),
    lambda x, b, h, q, k: (x["ids"][b] == x["ids"][b, q]).all() | (q == k),
    lambda x, b, h, q, k: (q >= k).any(),
]
JOINED: list[Term] = [lambda s, t: s & t, lambda s, t: s | t, lambda s, t: s & ~t, lambda s, t: s ^ t]
COMPARED: list[Term] = [
    *(lambda s, t: s < t, lambda s, t: s >= t, lambda s, t: s == t),
    lambda s, t: (s - t) % 3 != 0,
]


def _drawn(draw: Random, depth: int = 2) -> Term:
    """A random function of arrays and indices."""
    if depth and draw.random() < 0.7:
        join, left, right = draw.choice(JOINED), _drawn(draw, depth - 1), _drawn(draw, depth - 1)
        return lambda *at: join(left(*at), right(*at))
    if draw.random() < 0.3:
        return draw.choice(CONDITIONS)
    compare, one, other = draw.choice(COMPARED), draw.choice(TERMS), draw.choice(TERMS)
    return lambda *at: compare(one(*at), other(*at))


def _arrays(batch: int, length: int, seed: int = 0) -> dict[str, Tensor]:
    of = torch.Generator().manual_seed(seed)
    shapes = {"ids": (batch, length), "wide": (length, 3), "lengths": (batch,)}
    return {name: torch.randint(0, 4, shape, generator=of) for name, shape in shapes.items()}


def _predicate(term: Term, arrays: Any) -> Callable[..., Any]:
    return lambda b, h, q, k: term(arrays, b, h, q, k)


def _visible(mask: Any, like: Any, batch: int, heads: int, length: int) -> Any:
    dense = np.asarray(mask.spans(length, length, batch=batch, heads=heads, like=like).dense())
    return np.broadcast_to(dense, (batch, heads, length, length))


@given(seed=st.integers(0, 1 << 30))
@example(seed=1)
@example(seed=2)
def test_random_functions_mean_their_value_for_single_pairs(seed: int) -> None:
    draw = Random(seed)
    batch, heads, length = draw.choice([1, 2, 5, 32]), draw.choice([1, 2]), draw.choice([1, 4, 7])
    for _ in range(4 if everything() else 1):
        term, arrays = _drawn(draw), _arrays(batch, length, seed)
        predicate = _predicate(term, arrays)
        wanted = create_mask(predicate, batch, heads, length, length, device="cpu").numpy()
        assert (_visible(from_predicate(predicate), arrays["ids"], batch, heads, length) == wanted).all()
        on_host = from_predicate(_predicate(term, {name: x.numpy() for name, x in arrays.items()}))
        assert (_visible(on_host, None, batch, heads, length) == wanted).all()
        assert (_visible(from_predicate(predicate), None, batch, heads, length) == wanted).all()


@pytest.mark.slow
def test_random_functions_of_jax() -> None:
    jax = pytest.importorskip("jax")
    draw = Random(0)
    for batch in (1, 2, 5) if everything() else (2,):
        term, arrays = _drawn(draw), _arrays(batch, 4)
        wanted = create_mask(_predicate(term, arrays), batch, 2, 4, 4, device="cpu").numpy()

        def lower(x: Any, term: Term = term, batch: int = batch) -> Any:
            return from_predicate(_predicate(term, x)).spans(4, 4, batch=batch, heads=2, like=x["ids"]).bounds

        given = {name: jax.numpy.asarray(x.numpy()) for name, x in arrays.items()}
        for run in (lower, jax.jit(lower)):
            seen = np.asarray(Spans(run(given), 4).dense())
            assert (np.broadcast_to(seen, wanted.shape) == wanted).all()


def test_a_sum_of_one_row_keeps_padding_hidden() -> None:
    valid = torch.ones(2, 128, dtype=torch.bool)
    valid[1, 120:] = False
    mask = from_predicate(lambda b, h, q, k: (k <= q) & (k < valid[b].sum()))
    assert mask.spans(128, 128, batch=2, like=valid).bounds[1, 0, 127, 0].tolist() == [0, 120]
    block_mask = create_block_mask(mask.fn, 2, None, 128, 128, device="cpu")
    found = from_block_mask(block_mask).spans(128, 128, batch=2)
    assert found.bounds[1, 0, 127, 0].tolist() == [0, 120]


#: Functions of ids (2, 8) whose value index arrays of all pairs would change.
FUNCTIONS: dict[str, Callable[[Tensor], Callable[..., Tensor]]] = {
    "sum": lambda ids: lambda b, h, q, k: (k <= q) & (k < ids[b].sum()),
    "in steps": lambda ids: lambda b, h, q, k: (ids[b][q] == ids[b][k]) & (k <= q),
    "sorted, where": lambda ids: (
        lambda b, h, q, k: torch.where(
            (ids[b] == ids[b, q]).all(), k <= q, ids[b].sort().values[k] <= ids[b].float().mean()
        )
    ),
}
RECORDERS: dict[str, Callable[[Any, tuple[Tensor, ...]], Any]] = {
    "compile": lambda call, _: torch.compile(call, fullgraph=True, backend=BACKEND),
    "strict export": lambda call, x: torch.export.export(_Module(call), x, strict=True).module(),
    "export": lambda call, x: torch.export.export(_Module(call), x, strict=False).module(),
    "make_fx": lambda call, x: make_fx(call)(*x),
    "make_fx, symbolic": lambda call, x: make_fx(call, tracing_mode="symbolic")(*x),
    "make_fx, pre_dispatch": lambda call, x: make_fx(call, pre_dispatch=True)(*x),
    "jit": lambda call, x: torch.jit.trace(call, x, check_trace=False),
}


BACKEND = "aot_eager" if everything() else "eager"
SLOW = ("compile", "strict export", "export", "make_fx, symbolic")


class _Module(torch.nn.Module):
    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.call = call

    def forward(self, *given: Tensor) -> Any:
        return self.call(*given)


@pytest.mark.parametrize(
    "recorder", [pytest.param(x, marks=pytest.mark.slow) if x in SLOW else x for x in RECORDERS]
)
def test_recorded_programs_have_the_value_of_single_pairs(recorder: str) -> None:
    def call(q: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        masks = [from_predicate(make(ids), max_runs=8) for make in FUNCTIONS.values()]
        return tuple(attention(q, q, q, mask=mask) for mask in masks)

    draw = torch.Generator().manual_seed(0)
    q = torch.randn(2, 2, 8, 16, generator=draw)
    first, ids = (torch.randint(0, 3, (2, 8), generator=draw) for _ in range(2))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit.trace")
        found = RECORDERS[recorder](call, (q, first))(q, ids)
    for got, make in zip(found, FUNCTIONS.values(), strict=True):
        visible = create_mask(make(ids), 2, 2, 8, 8, device="cpu")
        exact = torch.nn.functional.scaled_dot_product_attention(q, q, q, visible)
        torch.testing.assert_close(got, exact.nan_to_num())


def test_recorders_read_captured_arrays_of_numpy() -> None:
    ids = np.arange(8)[None].repeat(2, 0) // 3
    mask = from_predicate(lambda b, h, q, k: (ids[b][q] == ids[b][k]) & (k < ids[b].sum()), max_runs=2)
    q = torch.randn(2, 1, 8, 16)
    recorded = make_fx(lambda q: attention(q, q, q, mask=mask), tracing_mode="symbolic")(q)
    torch.testing.assert_close(recorded(q), attention(q, q, q, mask=mask))


@pytest.mark.filterwarnings("ignore:`torch.jit.trace")
def test_the_reference_kernel_is_traced() -> None:
    def call(q: Tensor) -> Tensor:
        return attention(q, q, q, mask=causal(), backend="math")

    q = torch.randn(1, 1, 4, 8, dtype=torch.float64)
    traced = torch.jit.trace(call, q, check_trace=False)
    torch.testing.assert_close(traced(2 * q), call(2 * q))


@pytest.mark.slow
def test_a_fresh_process_traces_a_function() -> None:
    code = (
        "import torch; from attnspan import from_predicate; from attnspan.torch import attention\n"
        "mask = from_predicate(lambda b, h, q, k: q >= k)\n"
        "q = torch.randn(1, 1, 4, 8)\n"
        "torch.jit.trace(lambda q: attention(q, q, q, mask=mask), q, check_trace=False)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_mask_mod_of_tensors_is_planned_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    ids = torch.arange(32) // 8
    for fn in (lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k), lambda b, h, q, k: (q - k).abs() < 3):
        mask = from_predicate(fn)
        wanted = create_mask(fn, 1, 1, 32, 32, device="cpu").numpy()
        assert (np.asarray(mask.spans(32, 32).dense()) == wanted).all()
        layout = Layout.of(mask, q_len=32, ranks=2)
        layout.plan(mask, heads=(2, 2))
        mask.show(8)
        assert capsys.readouterr().out

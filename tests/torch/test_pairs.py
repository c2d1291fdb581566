"""A function as a mask means its value for single pairs, as FlexAttention's `create_mask` has it by vmap."""

# ruff: noqa: ARG005  (functions of a fixed signature, most of which need a part of it)
from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
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
    batch, heads, length = draw.choice([1, 2, 8]), draw.choice([1, 2]), draw.choice([1, 4, 7])
    term, arrays = _drawn(draw), _arrays(batch, length, seed)
    predicate = _predicate(term, arrays)
    wanted = create_mask(predicate, batch, heads, length, length, device="cpu").numpy()
    on_host = from_predicate(_predicate(term, {name: x.numpy() for name, x in arrays.items()}))
    for mask, like in ((from_predicate(predicate), arrays["ids"]), (on_host, None)):
        assert (_visible(mask, like, batch, heads, length) == wanted).all()


@pytest.mark.slow
def test_random_functions_of_jax() -> None:
    jax = pytest.importorskip("jax")
    term, arrays = _drawn(Random(0)), _arrays(2, 4)
    wanted = create_mask(_predicate(term, arrays), 2, 2, 4, 4, device="cpu").numpy()

    @jax.jit
    def lower(x: Any) -> Any:
        return from_predicate(_predicate(term, x)).spans(4, 4, batch=2, heads=2, like=x["ids"]).bounds

    seen = np.asarray(Spans(lower({n: jax.numpy.asarray(x.numpy()) for n, x in arrays.items()}), 4).dense())
    assert (np.broadcast_to(seen, wanted.shape) == wanted).all()


def test_a_sum_of_one_row_keeps_padding_hidden() -> None:
    valid = torch.ones(2, 128, dtype=torch.bool)
    valid[1, 120:] = False
    mask = from_predicate(lambda b, h, q, k: (k <= q) & (k < valid[b].sum()))
    assert mask.spans(128, 128, batch=2, like=valid).bounds[1, 0, 127, 0].tolist() == [0, 120]
    block_mask = create_block_mask(mask.fn, 2, None, 128, 128, device="cpu")
    found = from_block_mask(block_mask).spans(128, 128, batch=2)
    assert found.bounds[1, 0, 127, 0].tolist() == [0, 120]


def _of_rows(ids: Tensor) -> Callable[..., Tensor]:
    """Of a row's values, all and in steps: index arrays of all pairs would give others."""
    return lambda b, h, q, k: torch.where(
        (ids[b] == ids[b, q]).all(),
        k <= q,
        (ids[b].sort().values[k] <= ids[b].float().mean()) & (k < ids[b].sum()),
    )


class _Module(torch.nn.Module):
    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.call = call

    def forward(self, *given: Tensor) -> Any:
        return self.call(*given)


RECORDERS: dict[str, Callable[[Any, tuple[Tensor, ...]], Any]] = {
    "compile": lambda call, _: torch.compile(call, fullgraph=True, backend="eager"),
    "export": lambda call, x: torch.export.export(_Module(call), x, strict=False).module(),
    "make_fx, symbolic": lambda call, x: make_fx(call, tracing_mode="symbolic")(*x),
    "jit": lambda call, x: torch.jit.trace(call, x, check_trace=False),
    "strict export": lambda call, x: torch.export.export(_Module(call), x, strict=True).module(),
    "make_fx, pre_dispatch": lambda call, x: make_fx(call, pre_dispatch=True)(*x),
}
LONG = ("strict export", "make_fx, pre_dispatch")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.trace")
@pytest.mark.parametrize(
    "recorder", [pytest.param(x, marks=pytest.mark.long) if x in LONG else x for x in RECORDERS]
)
def test_recorded_programs_have_the_value_of_single_pairs(recorder: str) -> None:
    host = np.arange(8)[None].repeat(2, 0) // 3

    def call(q: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        mask = from_predicate(_of_rows(ids), max_runs=8)
        on_host = from_predicate(lambda b, h, q, k: host[b][q] == host[b][k], max_runs=2)
        return tuple(attention(q, q, q, mask=x) for x in (mask, on_host))

    draw = torch.Generator().manual_seed(0)
    q = torch.randn(2, 2, 8, 16, generator=draw)
    first, ids = (torch.randint(0, 3, (2, 8), generator=draw) for _ in range(2))
    found = RECORDERS[recorder](call, (q, first))(q, ids)
    of_host = torch.tensor(host[:1, :, None] == host[:1, None])
    for got, visible in zip(
        found, (create_mask(_of_rows(ids), 2, 2, 8, 8, device="cpu"), of_host), strict=True
    ):
        exact = torch.nn.functional.scaled_dot_product_attention(q, q, q, visible)
        torch.testing.assert_close(got, exact.nan_to_num())


@pytest.mark.filterwarnings("ignore:`torch.jit.trace")
def test_the_reference_kernel_is_traced() -> None:
    def call(q: Tensor) -> Tensor:
        return attention(q, q, q, mask=causal(), backend="math")

    q = torch.randn(1, 1, 4, 8, dtype=torch.float64)
    traced = torch.jit.trace(call, q, check_trace=False)
    torch.testing.assert_close(traced(2 * q), call(2 * q))


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

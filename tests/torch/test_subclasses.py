"""Subclasses of arrays: those that are known are read as what they are, any other is refused by name."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from closeness import relative_error
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention as torchs

import attnspan as a
from attnspan import jax as in_jax
from attnspan import torch as in_torch
from attnspan.errors import DtypeError, ShapeError
from attnspan.parallel import Layout
from attnspan.parallel.torch import loss
from attnspan.torch import attention, scaled_dot_product_attention


class Foreign(Tensor):
    """A subclass that nobody told us about."""


def _foreign(x: Tensor) -> Tensor:
    return x.as_subclass(Foreign)


Q = torch.zeros(1, 2, 3, 8)
BAD, IDS = _foreign(Q), _foreign(torch.tensor([0, 0, 1]))
MASKED, ROWS = np.ma.array([0, 0, 1], mask=[0, 1, 0]), np.ones((1, 3, 2, 8), np.float32)
CACHE = in_torch.StaticCache(1, 2, 4, 8)
WRAPPED = in_torch.wrap(
    lambda q, k, v: q + k + v, name="of_subclasses", schema="Tensor q, Tensor k, Tensor v", outputs="out"
)

CALLS: dict[str, Callable[[], Any]] = {
    "q": lambda: attention(BAD, Q, Q),
    "compiled q": lambda: torch.compile(attention, backend="eager")(BAD, Q, Q),
    "explain": lambda: in_torch.explain(BAD, Q, Q),
    "query": lambda: scaled_dot_product_attention(BAD, Q, Q),
    "attn_mask": lambda: scaled_dot_product_attention(Q, Q, Q, _foreign(torch.ones(3, 3).bool())),
    "mask": lambda: attention(Q, Q, Q, mask=a.segments(IDS)),
    "mask of numpy": lambda: a.segments(MASKED),
    "mask of lengths": lambda: a.key_padding(MASKED),
    "spans": lambda: a.Spans(_foreign(torch.zeros(1, 1, 3, 1, 2, dtype=torch.int32)), 3),
    "like": lambda: a.causal().prepare(3, 3, like=BAD),
    "bias": lambda: attention(Q, Q, Q, bias=_foreign(torch.zeros(3, 3))),
    "bias of slopes": lambda: a.alibi(_foreign(torch.zeros(2))),
    "causal bias as mask": lambda: attention(Q, Q, Q, mask=causal_lower_right(3, 3)),
    "sinks": lambda: attention(Q, Q, Q, sinks=_foreign(torch.zeros(2))),
    "dropout_seed": lambda: attention(Q, Q, Q, dropout_p=0.1, dropout_seed=_foreign(torch.tensor(1))),
    "q_index": lambda: attention(Q, Q, Q, mask=a.causal(), q_index=IDS),
    "k_index": lambda: attention(Q, Q, Q, mask=a.causal(), k_index=MASKED),
    "dropout_seeds": lambda: in_torch.dropout_seeds(_foreign(torch.tensor(1)), 1, 1),
    "cache": lambda: CACHE.update(BAD, Q),
    "wrap": lambda: WRAPPED(BAD, Q, Q),
    "call_jax": lambda: in_torch.call_jax(lambda x: x, BAD),
    "shard": lambda: Layout.of(a.causal(), q_len=3, ranks=3).shard({"ids": IDS[None]}, 0),
    "loss": lambda: loss.next_token_targets(IDS),
    "q in jax": lambda: in_jax.attention(np.ma.array(ROWS), ROWS, ROWS),
    "query in jax": lambda: in_jax.dot_product_attention(np.ma.array(ROWS), ROWS, ROWS),
    "mask in jax": lambda: in_jax.dot_product_attention(ROWS, ROWS, ROWS, mask=np.ma.array(ROWS[0, 0] > 0)),
    "lengths in jax": lambda: in_jax.dot_product_attention(
        *[jnp.asarray(ROWS)] * 3, key_value_seq_lengths=np.ma.array([2])
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_an_unknown_subclass_is_refused_by_name(name: str) -> None:
    with pytest.raises(DtypeError, match=r"a plain array or tensor, got .*(Foreign|MaskedArray|CausalBias)"):
        CALLS[name]()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "compiled"), [(causal_upper_left, False), (causal_lower_right, False), (causal_upper_left, True)]
)
def test_a_causal_bias_is_the_mask_that_it_stands_for(make: Callable[..., Any], compiled: bool) -> None:
    ours = scaled_dot_product_attention
    ours = torch.compile(ours, fullgraph=True, backend="aot_eager") if compiled else ours
    for lead in ((2, 4),) if compiled else ((2, 4), (4,)):
        q, k = torch.randn(*lead, 3, 8, requires_grad=True), torch.randn(*lead, 7, 8)
        bias = make(3, 7)
        wanted = torchs(q, k, k, attn_mask=bias)
        got = ours(q, k, k, attn_mask=bias)
        eps = 16 * torch.finfo(torch.float32).eps
        assert relative_error(got, wanted) <= eps
        assert relative_error(*(torch.autograd.grad(x.square().sum(), q)[0] for x in (got, wanted))) <= eps
    with pytest.raises(ShapeError, match=r"a causal bias of shape \(3, 7\), got \(3, 8\)"):
        scaled_dot_product_attention(q, k, k, attn_mask=make(3, 8))


def test_known_subclasses_are_taken(tmp_path: Any) -> None:
    parameter = torch.nn.Parameter(Q)
    assert attention(parameter, parameter, Q).shape == Q.shape
    ids = np.memmap(tmp_path / "ids", np.int32, "w+", shape=(3,))
    assert torch.equal(attention(Q, Q, Q, mask=a.segments(ids)), attention(Q, Q, Q))

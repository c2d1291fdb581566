"""Random calls of `attention`: masks x options x dtypes x strides x layouts x transforms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attnspan.torch import attention
from samples.parts import LONG_MASKS, MASKS, OPTIONS, Case
from samples.problems import DTYPES, Problem, make

__all__ = ["CORPUS", "RandomCall", "any_call"]

#: At most one of each kind goes into a call.
_KINDS = (("softcap", "strong softcap"), ("sinks", "sinks, one none", "sinks, bf16"))
_KINDS += (tuple(x for x in OPTIONS if x.startswith(("alibi", "T5", "dense", "distance", "long", "one"))),)
_KINDS += (("dropout", "dropout by seeds"), ("queries given", "shifted queries given"), ("keys given",))
_POSITIONAL = ("alibi", "T5", "distance", "long", "one distance", "dropout")
#: These have rows of their own.
_ROWS = {"dense with holes": 3, "dense with deep rows": 5}
_ANY_SIZE = ("random", "full", "causal", *LONG_MASKS)


@dataclass(frozen=True)
class RandomCall:
    """A problem, and how `attention` is given it.

    Attributes:
        layout: Of the call.
        strides: A name of STRIDES, for each of q, k, v.
        transform: A name of TRANSFORMS.
        threads: Of torch.
    """

    case: Case
    layout: str = "bhsd"
    strides: tuple[str, str, str] = ("plain",) * 3
    transform: str = "autograd"
    threads: int = 1

    def results(self) -> dict[str, Tensor]:
        """Under the oracle's names."""
        problem = make(self.case)
        inputs = dict(zip("qkv", map(_stored, self.strides, problem.inputs.values()), strict=True))
        leaves = {**inputs, **{n: x.clone() for n, x in problem.setting.parameters.items()}}

        def call(*given: Tensor) -> tuple[Tensor, Tensor]:
            named = dict(zip(leaves, given, strict=True))
            q, k, v = (named.pop(n) for n in "qkv")
            swap = (lambda x: x.transpose(1, 2)) if self.layout == "bshd" else (lambda x: x)
            keywords: Any = {**problem.keywords(named), "layout": self.layout, "return_lse": True}
            out, lse = attention(swap(q), swap(k), swap(v), **keywords)
            return swap(out), lse

        before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        try:
            out, lse, gradients = TRANSFORMS[self.transform](call, list(leaves.values()), problem)
        finally:
            torch.set_num_threads(before)
        return {"out": out, "lse": lse, **{f"d{n}": x for n, x in zip(leaves, gradients, strict=True)}}


def _strided(x: Tensor, shape: list[int], *at: Any) -> Tensor:
    """`x` in a part of a tensor of NaN, so that a read beyond it is seen."""
    whole = torch.full(shape, torch.nan, dtype=x.dtype)
    whole[at] = x
    return whole[at]


STRIDES: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda x: x.clone(),
    "every other row": lambda x: _strided(
        x, [*x.shape[:2], 2 * x.shape[2], x.shape[3]], ..., slice(1, None, 2), slice(None)
    ),
    "part of a row": lambda x: _strided(x, [*x.shape[:3], x.shape[3] + 3], ..., slice(2, -1)),
    "wide last stride": lambda x: _strided(x, [*x.shape[:3], 2 * x.shape[3]], ..., slice(None, None, 2)),
    "heads last": lambda x: x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
}


def _stored(strides: str, x: Tensor) -> Tensor:
    return STRIDES[strides](x.detach())


def _cotangents(problem: Problem, lse: Tensor) -> tuple[Tensor, Tensor]:
    return problem.dout, torch.where(lse.isfinite(), problem.dlse, 0.0)


Call = Callable[..., tuple[Tensor, Tensor]]
Found = tuple[Tensor, Tensor, Any]


def _by_autograd(call: Call, leaves: list[Tensor], problem: Problem) -> Found:
    leaves = [x.requires_grad_() for x in leaves]
    out, lse = call(*leaves)
    return out, lse, torch.autograd.grad((out, lse), leaves, _cotangents(problem, lse))


def _checkpointed(call: Call, leaves: list[Tensor], problem: Problem) -> Found:
    return _by_autograd(lambda *x: checkpoint(call, *x, use_reentrant=False), leaves, problem)


def _by_vjp(call: Call, leaves: list[Tensor], problem: Problem) -> Found:
    (out, lse), pull = torch.func.vjp(call, *leaves)
    return out, lse, pull(_cotangents(problem, lse))


def _mapped(call: Call, leaves: list[Tensor], problem: Problem) -> Found:
    """Over two calls, of which the second has other queries."""
    both = [torch.stack([x, x.flip(0) if i else x.neg()]) for i, x in enumerate(leaves)]
    results, pull = torch.func.vjp(torch.func.vmap(call), *both)
    cotangents = [torch.stack([x, x]) for x in _cotangents(problem, results[1][0])]
    return *(x[0] for x in results), [x[0] for x in pull(tuple(cotangents))]


TRANSFORMS: dict[str, Callable[[Call, list[Tensor], Problem], Found]] = {
    "autograd": _by_autograd,
    "checkpoint": _checkpointed,
    "vjp": _by_vjp,
    "vmap": _mapped,
}


@st.composite
def any_call(draw: st.DrawFn) -> RandomCall:
    """Small problems of every kind; shrinking goes to a plain call under a full mask."""
    mask = draw(st.sampled_from([*reversed(_ANY_SIZE), *MASKS]))
    kv_heads = draw(st.integers(1, 3))
    sizes = {"heads": kv_heads * draw(st.sampled_from([1, 2, 3])), "kv_heads": kv_heads}
    sizes |= {"head_dim": draw(st.integers(1, 80)), "v_dim": draw(st.integers(1, 80))}
    if mask in _ANY_SIZE:
        sizes |= {"batch": draw(st.integers(1, 2)), "q_len": draw(st.integers(1, 70))}
        sizes |= {"k_len": draw(st.integers(1, 130))}
    else:
        sizes |= {"batch": 2, "q_len": 17, "k_len": 17}
    sizes |= {"mask_batch": draw(st.sampled_from([1, None])), "mask_heads": draw(st.sampled_from([1, None]))}
    options = [draw(st.sampled_from(["", *kind])) for kind in _KINDS]
    if not any(x.startswith(_POSITIONAL) for x in options):
        options = options[:-2]  # indices, which nothing would read
    elif mask in ("cache", "documents, chunks") and not options[-2]:
        options = options[:-1]  # lowered masks do not say that their queries are not the last of the keys
    case = Case(
        tuple(x for x in options if x and sizes["q_len"] >= _ROWS.get(x, 0)),
        mask,
        draw(st.sampled_from(list(DTYPES.values()))),
        runs=draw(st.integers(1, 3)),
        empty=draw(st.booleans()),
        stored=draw(st.sampled_from(["bhsd", "bshd", "mixed"])),
        seed=draw(st.integers(0, 2**16)),
        **sizes,
    )
    strides = st.sampled_from(list(STRIDES))
    layout, transform = st.sampled_from(["bhsd", "bshd"]), st.sampled_from(list(TRANSFORMS))
    how = draw(layout), draw(st.tuples(strides, strides, strides)), draw(transform)
    return RandomCall(case, *how, draw(st.sampled_from([1, 2, 3])))


#: Calls that once failed, as `make fuzz` prints them. Rows to read, and not an example database:
#: a change of the strategy above or of hypothesis would make its entries into other calls, or drop them.
CORPUS: list[RandomCall] = []

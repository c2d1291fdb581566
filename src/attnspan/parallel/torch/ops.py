"""Operators ``attnspan::sharded_attention`` and its ``_backward``: attention and its exchanges.

They are opaque, like attention on one rank. The mask and the plan are two tensors among the arguments, so
they may change at each step without recompilation. A compiler must know only the number of heads that a rank
attends with. docs/design.md has the contract.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from attnspan.backends import table
from attnspan.call import Part, Problem
from attnspan.call.backend import asked
from attnspan.call.options import Options
from attnspan.parallel.local import decode
from attnspan.parallel.strategy import split_heads
from attnspan.torch import compat
from attnspan.torch._front import capability_of
from attnspan.torch.choice import backend_for
from attnspan.torch.compile import save_also
from attnspan.torch.ops import autograd_kernel, below_autograd, readable

from .comm import Ranks
from .engine import Done, Work, backward, forward
from .heads import Team, gather, key_heads, query_heads, scatter

__all__ = ["backend_for_parts", "sharded_attention", "sharded_attention_backward"]

_library = torch.library.Library("attnspan", "FRAGMENT")  # type: ignore[no-untyped-call]
# Not safe for CUDA graphs, which would replay the exchanges of one step's plan.
_TAGS = (
    torch.Tag.pt2_compliant_tag,
    torch.Tag.needs_fixed_stride_order,
    torch.Tag.cudagraph_unsafe,
)
# `plan` and `numbers` come from `local.encode`. `heads_here` are the query heads that this rank attends with.
# `backend` runs the parts.
_SHARED = (
    "Tensor plan, Tensor numbers, str group, int members, int heads_here, int kv_heads_here, str backend,"
    " float scale, float softcap=0.0, Tensor? bias=None, int bias_kind=0, Tensor? sinks=None,"
    " float dropout_p=0.0, Tensor? dropout_seed=None"
)
# After out and lse, for backward: q, k, v and out of all rows of the group if members split the heads, and
# always lse in float64, because float32 is too coarse for a large lse.
_library.define(  # type: ignore[no-untyped-call]
    f"sharded_attention(Tensor q, Tensor k, Tensor v, {_SHARED})"
    " -> (Tensor out, Tensor lse, Tensor group_q, Tensor group_k, Tensor group_v, Tensor group_out,"
    " Tensor group_lse)",
    tags=_TAGS,
)
# q, k, v, out and lse have the rows of the group if members split the heads. `kv_heads` counts all key heads.
_library.define(  # type: ignore[no-untyped-call]
    "sharded_attention_backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out,"
    " Tensor lse,"
    f" int kv_heads, {_SHARED}) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsinks)",
    tags=_TAGS,
)

_OPTIONS: tuple[Any, ...] = (0.0, None, 0, None, 0.0, None)
# Places of the first option, of bias and of sinks among the arguments of forward.
_FIRST_OPTION, _BIAS, _SINKS = 11, 12, 14


def _all(inputs: tuple[Any, ...], first: int) -> tuple[Any, ...]:
    """All arguments, with trailing defaults, which torch leaves out."""
    return (*inputs, *_OPTIONS[len(inputs) - first :])


def _lse_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _stored_bshd(like: Tensor, heads: int, length: Any, dim: Any, dtype: torch.dtype | None = None) -> Tensor:
    return like.new_empty((like.shape[0], length, heads, dim), dtype=dtype).transpose(1, 2)


def _read(options: tuple[Any, ...]) -> Options | None:
    softcap, bias, kind, sinks, dropout_p, seed = options
    if softcap == 0.0 and bias is None and sinks is None and dropout_p == 0.0:
        return None
    return Options(softcap, bias, kind, sinks, dropout_p, seed)


@contextmanager
def _reading(
    what: str, heads: tuple[int, int], q: Tensor, v: Tensor, given: tuple[Any, ...]
) -> Iterator[tuple[Team, Callable[..., Work]]]:
    """Context of a call: its team, and a function from q, k and v of this rank's heads to `Work`.

    Args:
        what: Name of the call. The ranks compare their calls, and in forward the values of options.
        heads: (Hq, Hkv) of all members.
        q, v: Tensors with the call's dtype and head dims.
        given: All arguments that forward and backward share.
    """
    data, numbers, group, members, _, _, backend, scale, *options = given
    ranks, read = Ranks.named(group, members), _read(tuple(options))
    o = read or Options()
    tables = decode(data, numbers.tolist())
    tensors = {"bias": o.bias, "sinks": o.sinks, "dropout_seed": o.dropout_seed}
    facts = {
        "call": what,
        "plan of the call": tables.numbers.plan,
        "batch size": q.shape[0],
        "head dims": (q.shape[3], v.shape[3]),
        "dtype": str(q.dtype),
        "backend": backend,
        "scale": scale,
        "softcap": o.softcap,
        "bias": (o.bias_kind, None if o.bias is None else o.bias.shape),
        "sinks": None if o.sinks is None else o.sinks.shape,
        "dropout_p": o.dropout_p,
    }
    given_ones = {name: [x] for name, x in tensors.items() if x is not None}
    ranks.agreement.note(facts, given_ones if what == "forward" else None)
    with ranks.scratch() as scratch:
        team = Team(ranks, tables.numbers, split_heads(*heads, members), scratch)
        runs = table("torch")[backend]
        yield team, lambda q, k, v: Work(tables, team, Part(q, k, v, None, scale, read), runs)


def _forward(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> tuple[Tensor, ...]:
    shared = _all((q, k, v, *given), _FIRST_OPTION)[3:]
    q, k, v = (readable(x) for x in (q, k, v))
    with _reading("forward", (q.shape[1], k.shape[1]), q, v, shared) as (team, mine):
        if len(team.heads) == 1:
            out, wide_lse = forward(mine(q, k, v))
            # Results of an operator must not alias each other.
            lse = wide_lse.to(_lse_dtype(q), copy=True)
            return out, lse, *(q.new_empty(0) for _ in range(4)), wide_lse
        arriving = [
            scatter(team, x, at, name)
            for x, at, name in ((q, query_heads, "q"), (k, key_heads, "k"), (v, key_heads, "v"))
        ]
        group_q, group_k, group_v = (each.wait() for each in arriving)
        group_out, group_lse = forward(mine(group_q, group_k, group_v))
        own_lse = group_lse[..., None].to(_lse_dtype(q))
        leaving = [
            gather(team, x, query_heads, q.shape[1], name)
            for x, name in ((group_out, "out"), (own_lse, "lse"))
        ]
        out, lse = (each.wait() for each in leaving)
        return out, lse[..., 0].contiguous(), group_q, group_k, group_v, group_out, group_lse


def _backward(*inputs: Any) -> tuple[Tensor, ...]:
    dout, dlse, q, k, v, out, lse, kv_heads, *given = inputs
    dout, q, k, v, out = (readable(x) for x in (dout, q, k, v, out))
    heads = dout.shape[1], kv_heads
    what = "backward" if dlse is None else "backward of out and lse"
    with _reading(what, heads, q, v, _all(tuple(given), 8)) as (team, mine):
        if len(team.heads) > 1:
            whole = [dout] if dlse is None else [dout, dlse[..., None]]
            arriving = [scatter(team, x, query_heads, f"d{i}") for i, x in enumerate(whole)]
            dout, *rest = (each.wait() for each in arriving)
            dlse = rest[0][..., 0] if rest else None
        found = backward(mine(q, k, v), Done(dout, dlse, out, lse))
        dq, dkv = found.dq, found.dkv
        if len(team.heads) > 1:
            parts = (dq, query_heads, heads[0], "dq"), (dkv, key_heads, kv_heads, "dkv")
            leaving = [gather(team, *part) for part in parts]
            dq, dkv = (each.wait() for each in leaving)
        dk, dv = (
            _stored_bshd(x, kv_heads, dkv.shape[2], x.shape[3]).copy_(part)
            for x, part in ((k, dkv[..., : k.shape[3]]), (v, dkv[..., k.shape[3] :]))
        )
        each = found.dbias, found.dsinks
        dbias, dsinks = (q.new_empty(0, dtype=torch.float32) if x is None else x for x in each)
        return dq, dk, dv, dbias, dsinks


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> tuple[Tensor, ...]:
    _, _, _, members, heads, kv_heads, *_ = _all((q, k, v, *given), _FIRST_OPTION)[3:]
    batch, q_heads, rows, _ = q.shape
    out = _stored_bshd(q, q_heads, rows, v.shape[3])
    lse = q.new_empty((batch, q_heads, rows), dtype=_lse_dtype(q))
    if members == 1:
        return out, lse, *(q.new_empty(0) for _ in range(4)), torch.empty_like(lse, dtype=torch.float64)
    group_q, group_k, group_v = (
        x.new_empty((x.shape[2] * members, batch, count, x.shape[3])).permute(1, 2, 0, 3)
        for x, count in ((q, heads), (k, kv_heads), (v, kv_heads))
    )
    group_out = _stored_bshd(q, heads, rows * members, v.shape[3])
    group_lse = lse.new_empty((batch, heads, rows * members), dtype=torch.float64)
    return out, lse, group_q, group_k, group_v, group_out, group_lse


def _backward_fake(*inputs: Any) -> tuple[Tensor, ...]:
    dout, _, q, k, v, _, _, kv_heads, *given = inputs
    _, _, _, members, _, _, _, _, *options = _all(tuple(given), 8)
    dq = _stored_bshd(q, dout.shape[1], dout.shape[2], q.shape[3])
    dk, dv = (_stored_bshd(x, kv_heads, x.shape[2] // members, x.shape[3]) for x in (k, v))
    bias, sinks = options[1], options[3]
    rest = [
        q.new_empty(0, dtype=torch.float32)
        if x is None
        else torch.empty_like(x, memory_format=torch.contiguous_format)
        for x in (bias, sinks)
    ]
    return dq, dk, dv, *rest


for _device in ("CPU", "CUDA"):
    _library.impl("sharded_attention", _forward, _device)  # type: ignore[no-untyped-call]
    _library.impl("sharded_attention_backward", _backward, _device)  # type: ignore[no-untyped-call]
torch.library.register_fake("attnspan::sharded_attention", _forward_fake, lib=_library)
torch.library.register_fake("attnspan::sharded_attention_backward", _backward_fake, lib=_library)

#: Operator `attnspan::sharded_attention`: the forward pass under a plan.
sharded_attention = torch.ops.attnspan.sharded_attention.default
#: Operator `attnspan::sharded_attention_backward`: its backward pass.
sharded_attention_backward = torch.ops.attnspan.sharded_attention_backward.default


def backend_for_parts(
    q: Tensor, k: Tensor, v: Tensor, k_len: int, options: tuple[str, ...], requested: str | None
) -> str:
    """Name the backend that runs the parts of a call under a plan, on all ranks and in both directions.

    Args:
        q, k, v: This rank's tensors, (B, H, S, D).
        k_len: Keys of all ranks.
        options: Names of the call's options.
        requested: Backend that the call names. None for the backend of the enclosing context.

    Raises:
        OptionError, BackendError: See `attnspan.kernels.choose`.
    """
    more = ("", "plan over ranks", capability_of(q.device)) if q.is_cuda else ()
    problem = Problem.of(q, k, v, None, more=more, options=options)
    return backend_for(replace(problem, k_len=k_len), asked(requested))


class _Forward(torch.autograd.Function):
    """Derivative of the forward operator."""

    @staticmethod
    def forward(ctx: Any, keyset: Any, *inputs: Any) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = below_autograd(sharded_attention, keyset, inputs)
        ctx.set_materialize_grads(False)
        q, k, v, plan, numbers, *rest = _all(inputs, _FIRST_OPTION)
        out, _, *group = found
        kept = group if rest[1] > 1 else (q, k, v, out, group[-1])
        *fixed, bias, kind, sinks, dropout_p, seed = rest
        ctx.save_for_backward(*kept, plan, numbers, bias, sinks, seed)
        ctx.numbers = k.shape[1], fixed, kind, dropout_p
        ctx.mark_non_differentiable(*group)
        return found

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *group: None) -> tuple[Any, ...]:
        del group
        needed: tuple[bool, ...] = ctx.needs_input_grad
        if dout is None and dlse is None:
            return (None,) * len(needed)
        q, k, v, out, lse, plan, numbers, bias, sinks, seed = ctx.saved_tensors
        kv_heads, fixed, kind, dropout_p = ctx.numbers
        if dout is None:
            assert dlse is not None
            rows = lse.shape[2] // fixed[1]
            dout = out.new_zeros((*dlse.shape[:2], rows, v.shape[3]))
        dq, dk, dv, dbias, dsinks = sharded_attention_backward(
            dout, dlse, q, k, v, out, lse, kv_heads, plan, numbers, *fixed, bias, kind, sinks, dropout_p, seed
        )
        gradients: list[Tensor | None] = [None] * (len(needed) + 1)
        gradients[1:4] = dq, dk, dv
        for at, grad in ((_BIAS + 1, dbias), (_SINKS + 1, dsinks)):
            if at < len(needed):
                gradients[at] = grad
        return tuple(
            x if need else None for x, need in zip_longest(gradients[: len(needed)], needed, fillvalue=None)
        )


class _Backward(torch.autograd.Function):
    """Node that raises. Without it, second derivatives would silently be zero."""

    @staticmethod
    def forward(ctx: Any, keyset: Any, *inputs: Any) -> tuple[Tensor, ...]:
        del ctx
        return below_autograd(sharded_attention_backward, keyset, inputs)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> None:
        del ctx, grads
        raise NotImplementedError(
            "second derivatives of attnspan::sharded_attention: expected a first derivative, got a "
            'derivative of its backward. On one rank, `with attnspan.backend("math"):` has all derivatives.'
        )


for _op, _function in ((sharded_attention, _Forward), (sharded_attention_backward, _Backward)):
    _library.impl(_op, autograd_kernel(_op, _function), "Autograd", with_keyset=True)  # type: ignore[no-untyped-call]
save_also(sharded_attention)


def _flops(given: Sequence[Any], batch: int, rows: int, keys: int, dims: int) -> int:
    """2 * pairs * (D + Dv) over the visible pairs of a rank, or over all pairs if the plan has no data."""
    plan, numbers, group, members, heads = given[:5]
    if isinstance(plan, compat.FakeTensor) or plan.is_meta:
        every: int = batch * heads * rows * keys * Ranks.named(group, members).whole.size()
        return 2 * dims * every
    pairs = 0.0
    for stage in decode(plan, numbers.tolist()).stages:
        lo, hi = stage.bounds.unbind(-1)
        # If heads of the mask differ, each head counts as their mean.
        repeats = batch // stage.bounds.shape[0] * heads / stage.bounds.shape[1]
        pairs += int(int((hi - lo).sum(dtype=torch.int64)) * repeats)
    return int(2 * dims * pairs)


@compat.flop_formula(sharded_attention.overloadpacket)
def _forward_flops(q: Tensor, k: Tensor, v: Tensor, *given: Any, **_: Any) -> int:
    """FLOPs of one rank's forward call."""
    return _flops(given, q.shape[0], q.shape[2] * given[3], k.shape[2], q.shape[3] + v.shape[3])


@compat.flop_formula(sharded_attention_backward.overloadpacket)
def _backward_flops(dout: Tensor, _dlse: Any, q: Tensor, k: Tensor, v: Tensor, *given: Any, **_: Any) -> int:
    """FLOPs of one rank's backward call, 2.5 times the FLOPs of the forward call."""
    keys: int = k.shape[2] // given[6]
    return 5 * _flops(given[3:], dout.shape[0], q.shape[2], keys, q.shape[3] + v.shape[3]) // 2

"""Operators ``attnspan::sharded_attention`` and its ``_backward``: attention and its exchanges.

They are opaque, like attention on one rank. The mask and the plan are two tensors among the arguments, so
they may change at each step without recompilation. A compiler must know only the number of heads that a rank
attends with. docs/design.md has the contract.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnspan.backends import Softmax, find
from attnspan.call import Part, Problem, schema
from attnspan.call.backend import asked
from attnspan.call.options import Options, changes
from attnspan.parallel.local import decode
from attnspan.parallel.strategy import split_heads
from attnspan.torch import compat
from attnspan.torch._autograd import below_autograd, define, differentiate, refuse_derivative
from attnspan.torch._front import capability_of
from attnspan.torch._signature import arguments
from attnspan.torch.choice import backend_for
from attnspan.torch.compile import save_also
from attnspan.torch.ops import readable, stored_bshd

from .comm import Ranks
from .engine import OPTIONS_WITH_GRADIENT, Work, backward, forward
from .heads import Team, gather, key_heads, query_heads, scatter

_library = torch.library.Library("attnspan", "FRAGMENT")  # type: ignore[no-untyped-call]
# Not safe for CUDA graphs, which would replay the exchanges of one step's plan.
_TAGS = (torch.Tag.needs_fixed_stride_order, torch.Tag.cudagraph_unsafe)
_DEVICES = ("CPU", "CUDA")

_Q, _K, _V = schema.arrays(schema.INPUTS)[:3]
_OUT, _LSE = schema.RESULTS
#: Options of the operators. The plan knows the indices of queries and keys.
PLAN_OPTIONS = tuple(row for row in schema.OPTIONS if row.name not in ("q_index", "k_index"))
# `plan` and `numbers` come from `local.encode`. `heads_here` are the query heads that this rank attends with.
# `backend` runs the parts.
_SHARED = (
    *(schema.Array(name, "", "int32") for name in ("plan", "numbers")),
    *(schema.Number(name, kind) for name, kind in (("group", "str"), ("members", "int"))),
    *(schema.Number(name, "int") for name in ("heads_here", "kv_heads_here")),
    *(schema.Number("backend", "str"), schema.Number("scale")),
    *PLAN_OPTIONS,
)
_FORWARD: tuple[schema.Row, ...] = (_Q, _K, _V, *_SHARED)
# q, k, v, out and lse have the rows of the group if members split the heads. `kv_heads` counts all key heads.
_BACKWARD: tuple[schema.Row, ...] = (
    *schema.BACKWARD[:2],
    *(_Q, _K, _V, _OUT, _LSE, schema.Number("kv_heads", "int")),
    *_SHARED,
)


def _lse_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


@contextmanager
def _reading(
    what: str, heads: tuple[int, int], given: dict[str, Any]
) -> Iterator[tuple[Team, Callable[..., Work]]]:
    """Context of a call: its team, and a function from q, k and v of this rank's heads to `Work`.

    Args:
        what: Name of the call. The ranks compare their calls, and in forward the values of options.
        heads: (Hq, Hkv) of all members.
        given: The arguments, keyed by name.
    """
    q, v, members, scale = (given[name] for name in ("q", "v", "members", "scale"))
    options = Options(**{row.name: given[row.name] for row in PLAN_OPTIONS})
    ranks, tables = Ranks.named(given["group"], members), decode(given["plan"], given["numbers"].tolist())
    tensors = {row.name: given[row.name] for row in schema.arrays(PLAN_OPTIONS)}
    facts = {
        "call": what,
        "plan of the call": tables.numbers.plan,
        "batch size": q.shape[0],
        "head dims": (q.shape[3], v.shape[3]),
        "dtype": str(q.dtype),
        "backend": given["backend"],
        "scale": scale,
        **{row.name: given[row.name] for row in PLAN_OPTIONS if isinstance(row, schema.Number)},
        **{name: None if x is None else x.shape for name, x in tensors.items()},
    }
    values = {name: [x] for name, x in tensors.items() if x is not None}
    ranks.agreement.note(facts, values if what == "forward" else None)
    with ranks.scratch() as scratch:
        team = Team(ranks, tables.numbers, split_heads(*heads, members), scratch)
        runs, read = find("torch", given["backend"]), options if changes(options) else None
        yield team, lambda q, k, v: Work(tables, team, Part(q, k, v, None, scale, read), runs)


def _forward(*inputs: Any) -> tuple[Tensor, ...]:
    given = schema.by_name(_FORWARD, inputs)
    q, k, v = (readable(given[name]) for name in "qkv")
    with _reading("forward", (q.shape[1], k.shape[1]), given) as (team, mine):
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
    given = schema.by_name(_BACKWARD, inputs)
    dout, q, k, v, out = (readable(given[name]) for name in ("dout", "q", "k", "v", "out"))
    dlse, lse, kv_heads = (given[name] for name in ("dlse", "lse", "kv_heads"))
    heads = dout.shape[1], kv_heads
    what = "backward" if dlse is None else "backward of out and lse"
    with _reading(what, heads, given) as (team, mine):
        if len(team.heads) > 1:
            whole = [dout] if dlse is None else [dout, dlse[..., None]]
            arriving = [scatter(team, x, query_heads, f"d{i}") for i, x in enumerate(whole)]
            dout, *rest = (each.wait() for each in arriving)
            dlse = rest[0][..., 0] if rest else None
        dq, dkv, of_options = backward(mine(q, k, v), Softmax(out, lse, dout, dlse))
        if len(team.heads) > 1:
            parts = (dq, query_heads, heads[0], "dq"), (dkv, key_heads, kv_heads, "dkv")
            leaving = [gather(team, *part) for part in parts]
            dq, dkv = (each.wait() for each in leaving)
        dk, dv = (
            stored_bshd(x, kv_heads, dkv.shape[2], x.shape[3]).copy_(part)
            for x, part in ((k, dkv[..., : k.shape[3]]), (v, dkv[..., k.shape[3] :]))
        )
        nothing = (q.new_empty(0, dtype=torch.float32) if x is None else x for x in of_options)
        return dq, dk, dv, *nothing


def _forward_fake(*inputs: Any) -> tuple[Tensor, ...]:
    given = schema.by_name(_FORWARD, inputs)
    q, k, v, members = (given[name] for name in ("q", "k", "v", "members"))
    heads, kv_heads = given["heads_here"], given["kv_heads_here"]
    batch, q_heads, rows, _ = q.shape
    out = stored_bshd(q, q_heads, rows, v.shape[3])
    lse = q.new_empty((batch, q_heads, rows), dtype=_lse_dtype(q))
    if members == 1:
        return out, lse, *(q.new_empty(0) for _ in range(4)), torch.empty_like(lse, dtype=torch.float64)
    group_q, group_k, group_v = (
        x.new_empty((x.shape[2] * members, batch, count, x.shape[3])).permute(1, 2, 0, 3)
        for x, count in ((q, heads), (k, kv_heads), (v, kv_heads))
    )
    group_out = stored_bshd(q, heads, rows * members, v.shape[3])
    group_lse = lse.new_empty((batch, heads, rows * members), dtype=torch.float64)
    return out, lse, group_q, group_k, group_v, group_out, group_lse


def _backward_fake(*inputs: Any) -> tuple[Tensor, ...]:
    given = schema.by_name(_BACKWARD, inputs)
    dout, q, k, v = (given[name] for name in ("dout", "q", "k", "v"))
    kv_heads, members = given["kv_heads"], given["members"]
    dq = stored_bshd(q, dout.shape[1], dout.shape[2], q.shape[3])
    dk, dv = (stored_bshd(x, kv_heads, x.shape[2] // members, x.shape[3]) for x in (k, v))
    rest = [
        q.new_empty(0, dtype=torch.float32)
        if x is None
        else torch.empty_like(x, memory_format=torch.contiguous_format)
        for x in map(given.get, OPTIONS_WITH_GRADIENT)
    ]
    return dq, dk, dv, *rest


# After out and lse, for backward: q, k, v and out of all rows of the group if members split the heads, and
# always lse in float64, because float32 is too coarse for a large lse.
#: Operator `attnspan::sharded_attention`: the forward pass under a plan.
sharded_attention = define(
    _library,
    f"sharded_attention({arguments(_FORWARD)})"
    " -> (Tensor out, Tensor lse, Tensor group_q, Tensor group_k, Tensor group_v, Tensor group_out,"
    " Tensor group_lse)",
    *(_forward_fake, *_TAGS),
    **dict.fromkeys(_DEVICES, _forward),
)
_GRADIENTS = ", ".join(f"Tensor d{name}" for name in ("q", "k", "v", *OPTIONS_WITH_GRADIENT))
#: Operator `attnspan::sharded_attention_backward`: its backward pass.
sharded_attention_backward = define(
    _library,
    f"sharded_attention_backward({arguments(_BACKWARD)}) -> ({_GRADIENTS})",
    *(_backward_fake, *_TAGS),
    **dict.fromkeys(_DEVICES, _backward),
)


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
        OptionError, BackendError: See `attnspan.backends.choose`.
    """
    more = ("", ("plan over ranks",), capability_of(q.device)) if q.is_cuda else ()
    problem = Problem.of(q, k, v, None, more=more, options=options)
    return backend_for(replace(problem, k_len=k_len), asked(requested))


class _Forward(torch.autograd.Function):
    """Derivative of the forward operator."""

    @staticmethod
    def forward(ctx: Any, source: Any, *inputs: Any) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = below_autograd(*source)
        ctx.set_materialize_grads(False)
        given = schema.by_name(_FORWARD, inputs)
        out, _, *group = found
        # q, k, v, out and lse of the group if members split the heads, else the rank's own.
        kept = group if given["members"] > 1 else (*inputs[:3], out, group[-1])
        given |= dict(zip(("q", "k", "v", "out", "lse"), kept, strict=True), kv_heads=inputs[1].shape[1])
        rows = _BACKWARD[2:]
        ctx.save_for_backward(*(given[row.name] for row in schema.arrays(rows)))
        ctx.numbers = {row.name: given[row.name] for row in rows if isinstance(row, schema.Number)}
        ctx.mark_non_differentiable(*group)
        return found

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *group: None) -> tuple[Any, ...]:
        del group
        # The first input is the source. Torch leaves out trailing defaults.
        needed: tuple[bool, ...] = ctx.needs_input_grad[1:]
        if dout is None and dlse is None:
            return (None,) * (len(needed) + 1)
        rows = _BACKWARD[2:]
        given = dict(zip(schema.names(schema.arrays(rows)), ctx.saved_tensors, strict=True)) | ctx.numbers
        if dout is None:
            assert dlse is not None
            shape = *dlse.shape[:2], given["lse"].shape[2] // given["members"], given["v"].shape[3]
            dout = given["out"].new_zeros(shape)
        found = sharded_attention_backward(dout, dlse, *(given[row.name] for row in rows))
        grads = dict(zip(("q", "k", "v", *OPTIONS_WITH_GRADIENT), found, strict=True))
        pairs = zip(schema.names(_FORWARD), needed, strict=False)
        return None, *(grads.get(name) if need else None for name, need in pairs)


differentiate(_library, sharded_attention, _Forward)
refuse_derivative(
    _library,
    sharded_attention_backward,
    'On one rank, `with attnspan.backend("math"):` has all derivatives',
)
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

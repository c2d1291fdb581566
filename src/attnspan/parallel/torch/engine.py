"""Attention of one rank's queries to the keys of all ranks, forward and backward: exchanges, kernel, sums.

Shapes: B batch elements, H query heads and G key heads of this rank while it attends, N rows and S keys of
its group, K keys of a stage, D and Dv head dims. If several calls compute parts of one query, the parts are
added in float32 for any input dtype (float64 for float64).
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnspan.backends import Backend, Softmax, table
from attnspan.call import Part, schema
from attnspan.call.options import Options, changes
from attnspan.parallel.cost import exchange_parts
from attnspan.parallel.local import Stage, Tables
from attnspan.torch.ops import stored_bshd

from .comm import Pending
from .heads import Team, fold_heads, repeat_heads
from .keys import KeyRoute, from_rows, pass_on, to_rows, unsorted, whole

OPTIONS_WITH_GRADIENT = schema.with_gradient(schema.OPTIONS)


class Work(NamedTuple):
    """Work of one rank: its call, its plan, and the participating ranks.

    Args:
        tables: The rank's plan, with tensors.
        team: The participating ranks.
        call: q (B, H, N, D), k (B, G, S, D) and v (B, G, S, Dv) of this rank, and options for the heads of
            all members, without indices. The tables have the bounds.
        backend: Backend that runs the parts.
    """

    tables: Tables
    team: Team
    call: Part
    backend: Backend

    @property
    def every(self) -> slice:
        """Slice of all query heads of this rank."""
        return slice(0, self.call.q.shape[1])

    def among_all(self, heads: slice) -> slice:
        """Slice of some of this rank's query heads, among the query heads of all members."""
        first = self.team.mine.q_start
        return slice(first + heads.start, first + heads.stop)


#: Gradients of q, (B, H, n, D) as q. Of the keys and values side by side, (B, Hkv, n, D + Dv), float32 or
#: float64. Of `OPTIONS_WITH_GRADIENT`, or None for an absent option: in the shape of the whole option, and
#: zero for the heads of other members.
Gradients = tuple[Tensor, Tensor, tuple[Tensor | None, ...]]


def forward(work: Work) -> tuple[Tensor, Tensor]:
    """Compute out (B, H, N, Dv) in q's dtype and lse (B, H, N) in float64."""
    return (_forward_at_once if len(work.tables.stages) == 1 else _forward_ring)(work)


def backward(work: Work, done: Softmax) -> Gradients:
    """Compute the gradients of `forward`."""
    return (_backward_at_once if len(work.tables.stages) == 1 else _backward_ring)(work, done)


def _parts(work: Work) -> list[tuple[slice, slice]]:
    """Query and key heads of each part."""
    count = 1 if work.tables.transfer is None else exchange_parts(list(work.team.heads))
    heads, key_heads = work.call.q.shape[1], work.call.k.shape[1]
    if count == 1:
        return [(slice(0, heads), slice(0, key_heads))]
    group, cuts = heads // key_heads, [key_heads * i // count for i in range(count + 1)]
    return [(slice(a * group, b * group), slice(a, b)) for a, b in pairwise(cuts)]


def _arriving(work: Work, route: KeyRoute) -> Iterator[tuple[int, slice, slice, tuple[Tensor, Tensor], Part]]:
    """The number of each part, its query heads, its key heads, their keys and values, and its call."""
    parts, call = _parts(work), work.call
    # Start all exchanges at once. While one part is computed, the other parts travel.
    coming = [route.fetch(call.k[:, at], call.v[:, at], i) for i, (_, at) in enumerate(parts)]
    for i, ((heads, at), fetched) in enumerate(zip(parts, coming, strict=True)):
        k, v = fetched.wait()
        yield i, heads, at, (k, v), _call(work, work.tables.stages[0], k, v, call.options, heads)


def _forward_at_once(work: Work) -> tuple[Tensor, Tensor]:
    q = work.call.q
    out = stored_bshd(q, q.shape[1], q.shape[2], work.call.v.shape[3])
    lse = q.new_empty(q.shape[:3], dtype=torch.float64)
    for _, heads, _, _, call in _arriving(work, KeyRoute(work.tables, work.team)):
        lse[:, heads] = _attend_some(work, call, out[:, heads])
    return out, lse


def _backward_at_once(work: Work, done: Softmax) -> Gradients:
    q, route = work.call.q, KeyRoute(work.tables, work.team)
    dq = stored_bshd(q, q.shape[1], q.shape[2], q.shape[3])
    sums, returned = _OptionSums(work.call.options), []
    for i, heads, at, keys, call in _arriving(work, route):
        grads = route.gradients(*keys, i)
        dkv = from_rows(grads, q.shape[3])
        found = _differentiate_some(work, call, _some(done, heads), dq[:, heads], dkv)
        sums.add(found, work.among_all(heads))
        returned.append((at, grads, route.give_back(grads, i)))
    return dq, whole(route.collect(returned, *work.call.k.shape[1:3])), sums.results()


def _forward_ring(work: Work) -> tuple[Tensor, Tensor]:
    q, options = work.call.q, work.call.options
    bare = None if options is None else options._replace(sinks=None)
    total = _Merged(q.new_zeros((*q.shape[:3], work.call.v.shape[3]), dtype=_wide(q)))
    for stage, rows in _round(work):
        if not stage.visible:
            continue
        k, v = from_rows(rows, q.shape[3])
        part = stored_bshd(q, q.shape[1], q.shape[2], work.call.v.shape[3], _wide(q))
        total.add(part, _attend_some(work, _call(work, stage, k, v, bare, work.every), part))
    if options is not None and options.sinks is not None:
        total.join(options.sinks[work.among_all(work.every)])
    out = stored_bshd(q, q.shape[1], q.shape[2], work.call.v.shape[3])
    return out.copy_(total.out), total.lse


def _backward_ring(work: Work, done: Softmax) -> Gradients:
    """Send keys round once more. Each block's gradients follow one step behind, and end at their owner."""
    q, options = work.call.q, work.call.options
    bare = None if options is None else options._replace(sinks=None)
    dq = q.new_zeros(q.shape, dtype=_wide(q))
    sums, every = _OptionSums(options), work.among_all(work.every)
    behind: Pending | None = None
    shape: tuple[int, ...] = ()
    for stage, rows in _round(work):
        shape = rows.shape
        grads = torch.zeros(rows.shape, dtype=_wide(rows), device=rows.device)
        if stage.visible:
            k, v = from_rows(rows, q.shape[3])
            part = stored_bshd(q, q.shape[1], q.shape[2], q.shape[3], _wide(q))
            call = _call(work, stage, k, v, bare, work.every)
            sums.add(_differentiate_some(work, call, done, part, from_rows(grads, q.shape[3])), every)
            dq += part
        if behind is not None:
            grads += behind.wait().view_as(grads)
        behind = pass_on(grads, work.team, "gradients")
    assert behind is not None
    if options is not None and options.sinks is not None:
        sums.add({"sinks": _sink_gradients(options.sinks[every], done)}, every)
    dkv = whole(unsorted(behind.wait().view(shape), work.tables.key_order))
    narrow = stored_bshd(q, q.shape[1], q.shape[2], q.shape[3])
    return narrow.copy_(dq), dkv, sums.results()


def _round(work: Work) -> Iterator[tuple[Stage, Tensor]]:
    """Yield the blocks of keys in order of arrival. The next block travels while one is computed."""
    stages, planes = work.tables.stages, work.tables.numbers.planes
    rows = to_rows(work.call.k, work.call.v, planes, work.tables.key_order)
    for step, stage in enumerate(stages):
        coming = pass_on(rows, work.team, "ring") if step + 1 < len(stages) else None
        yield stage, rows
        if coming is not None:
            rows = coming.wait().view(rows.shape)


class _Merged:
    """Sum of parts of a softmax over disjoint keys (Milakov and Gimelshein 2018, section 3.1)."""

    def __init__(self, out: Tensor) -> None:
        self.out = out
        self.lse = out.new_full(out.shape[:3], -torch.inf, dtype=torch.float64)

    def add(self, out: Tensor, lse: Tensor) -> None:
        """Add the keys of one more call."""
        total = torch.logaddexp(self.lse, lse)
        old, new = (_weight(x, total).to(out.dtype) for x in (self.lse, lse))
        self.out.mul_(old).add_(out * new)
        self.lse = total

    def join(self, sinks: Tensor) -> None:
        """Add each head's sink, (H,), to the denominators. Sinks have no values."""
        total = torch.logaddexp(self.lse, sinks[None, :, None].to(self.lse.dtype).expand_as(self.lse))
        self.out.mul_(_weight(self.lse, total).to(self.out.dtype))
        self.lse = total


def merged(outs: Tensor, lses: Tensor, sinks: Tensor | None) -> Tensor:
    """Merge outputs (P, B, H, N, Dv) of attention to disjoint keys by their lse (P, B, H, N)."""
    total = _Merged(torch.zeros_like(outs[0]))
    for out, lse in zip(outs, lses, strict=True):
        total.add(out, lse.double())
    if sinks is not None:
        total.join(sinks)
    return total.out


def _weight(part: Tensor, total: Tensor) -> Tensor:
    """Weight exp(part - total) as (B, H, N, 1), and 0 for empty parts, whose difference may be NaN."""
    return torch.where(part == -torch.inf, 0.0, (part - total).exp())[..., None]


def _sink_gradients(sinks: Tensor, done: Softmax) -> Tensor:
    """Gradient of each sink s: the sum over its queries of exp(s - lse) * (dlse - dout . out)."""
    wide = _wide(done.out)
    slack = -(done.dout.to(wide) * done.out.to(wide)).sum(-1)
    slack = slack if done.dlse is None else slack + done.dlse
    # A query that sees nothing, not even a sink, has lse -inf.
    share = _weight(sinks[None, :, None].to(done.lse.dtype).expand_as(done.lse), done.lse)[..., 0]
    found: Tensor = (share * slack).sum((0, 2)).to(wide)
    return found


class _OptionSums:
    """Sums of the gradients of options over several calls and heads."""

    def __init__(self, options: Options | None) -> None:
        self._kind = 0 if options is None else options.bias_kind
        self._sums: dict[str, Tensor] = {
            name: torch.zeros_like(x, memory_format=torch.contiguous_format)
            for name in OPTIONS_WITH_GRADIENT
            if (x := getattr(options, name, None)) is not None
        }

    def add(self, found: Mapping[str, Tensor | None], heads: slice) -> None:
        """Add the gradients of a call for some heads."""
        for name, grad in found.items():
            if grad is not None:
                self._sums[name][_index_of(name, heads, self._kind)] += grad

    def results(self) -> tuple[Tensor | None, ...]:
        """The sums."""
        return tuple(map(self._sums.get, OPTIONS_WITH_GRADIENT))


def _index_of(name: str, heads: slice, kind: int) -> tuple[slice, ...]:
    """Index of some heads in an array of the call."""
    dim = schema.dim(name, "h", None, kind)
    return () if dim is None else (*[slice(None)] * dim, heads)


def _of_heads(name: str, x: Tensor | None, heads: slice, kind: int = 0) -> Tensor | None:
    """An array of the call for some of the heads. Heads may share it."""
    dim = schema.dim(name, "h", None, kind)
    if x is None or dim is None or (schema.is_shared(name, "h", kind) and x.shape[dim] == 1):
        return x
    return x[_index_of(name, heads, kind)].contiguous()


def _options_of(options: Options, heads: slice) -> Options:
    """Options of some of the heads."""
    arrays = schema.names(schema.arrays(schema.OPTIONS))
    kind = options.bias_kind
    parts = {name: _of_heads(name, getattr(options, name), heads, kind) for name in arrays}
    return Options(**{**options._asdict(), **parts})


def _call(work: Work, stage: Stage, k: Tensor, v: Tensor, options: Options | None, heads: slice) -> Part:
    """Call for some of this rank's heads on the keys of a stage."""
    at = work.among_all(heads)
    bounds = _of_heads("bounds", stage.bounds, at)
    options = None if options is None or not changes(options) else _options_of(options, at)
    if options is not None:
        options = options._replace(q_index=work.tables.q_index, k_index=stage.keys)
    if heads == work.every:
        k, v = (repeat_heads(x, work.team.mine.kv_map) for x in (k, v))
    q = work.call.q[:, heads]
    return replace(work.call, q=q, k=k, v=v, bounds=bounds, options=options)


def _backend_of(work: Work, call: Part) -> Backend:
    """Backend of a part. FlexAttention needs keys, and a rank whose queries see nothing has none."""
    return work.backend if call.k.shape[2] else table("torch")["math"]


def _attend_some(work: Work, call: Part, out: Tensor) -> Tensor:
    """Run the backend, unless this member has no heads."""
    if call.q.shape[1] == 0:
        return out.new_empty(call.q.shape[:3], dtype=torch.float64)
    lse: Tensor = _backend_of(work, call).forward(call, out)
    return lse


def _differentiate_some(
    work: Work, call: Part, done: Softmax, dq: Tensor, dkv: tuple[Tensor, Tensor]
) -> Mapping[str, Tensor | None]:
    """Write a part's gradients of q, k and v, and return the gradients of its options, keyed by name."""
    if call.q.shape[1] == 0:
        for x in dkv:
            x.zero_()
        return {}
    softmax = done._replace(
        lse=done.lse.contiguous(),
        dout=done.dout if done.dout.stride(-1) == 1 else done.dout.contiguous(),
        dlse=None if done.dlse is None else done.dlse.contiguous(),
        has_more=len(work.tables.stages) > 1,
    )
    run: Any = _backend_of(work, call).backward
    if call.k.shape[1] == dkv[0].shape[1]:
        found = run(call, softmax, (dq, *dkv))
        return dict(zip(OPTIONS_WITH_GRADIENT, found, strict=True))
    repeated = [torch.empty(x.shape, dtype=dkv[0].dtype, device=x.device) for x in (call.k, call.v)]
    found = run(call, softmax, (dq, *repeated))
    for grad, into in zip(repeated, dkv, strict=True):
        fold_heads(grad, work.team.mine.kv_map, into)
    return dict(zip(OPTIONS_WITH_GRADIENT, found, strict=True))


def _some(done: Softmax, heads: slice) -> Softmax:
    """Select some heads."""
    out, lse, dout, dlse = (None if x is None else x[:, heads] for x in done[:4])
    return Softmax(out, lse, dout, dlse)


def _wide(x: Tensor) -> torch.dtype:
    """Dtype of sums: float32, or float64 for float64."""
    return torch.promote_types(x.dtype, torch.float32)

"""Watcher of eager steps: records every attention call, its inputs, and copies on the way.

Hand-written attention is found by its data flow: a product of two tensors, a softmax, and a product with a
third tensor.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import attnspan
from attnspan import Spans
from attnspan_lab.doctor.heads import HeadMap, head_map
from attnspan_lab.doctor.overflow import Overflow, has_inf, overflow_of, overflow_of_data
from attnspan_lab.doctor.places import Place, is_direct, lines_here, lines_in, on_stack, place_here
from attnspan_lab.doctor.written import first_scores, scale_of

if TYPE_CHECKING:
    from attnspan_lab.doctor.padding import Fault

__all__ = ["HIDDEN", "Attention", "Watcher", "watching"]

# Scores at or below this value are hidden: -inf, the smallest numbers of dtypes, and -1e4 in half precision.
HIDDEN = -9e3
_PRODUCTS = ("bmm", "matmul", "baddbmm")
_MASKING = ("masked_fill", "masked_fill_", "where", "add", "add_", "mul", "mul_")
_SOFTMAX = ("_softmax", "_safe_softmax", "exp", "softmax")
_COPIES = {
    *("clone", "_reshape_copy", "repeat", "expand_copy", "contiguous", "cat", "stack"),
    *("index", "index_select", "gather"),
}
# Operators whose result has a size that the host must read, and functions that give values to Python.
_READS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive"}
_TO_PYTHON = {"tolist", "numpy", "__array__", "__repr__", "__format__"}
_MULTIHEAD = torch.nn.functional.__file__
_CHECKPOINT = torch.utils.checkpoint.__file__
_ATTNSPAN = str(Path(attnspan.__file__).parent)
_LAB = str(Path(__file__).parents[1])
_PAIRS = 2**24  # maximum number of pairs for which the mask is kept


@dataclass(eq=False)
class Attention:
    """One attention call.

    Attributes:
        kind: "sdpa", "flex", "attnspan", "custom" (another library's operator) or "written out".
        kernel: The operator that ran, or "" if scores were stored.
        place: The user's line.
        q, k: Shapes of q and k.
        dtype: Dtype of q.
        recomputed: The call ran in a backward pass, for checkpointing.
        visible: Pairs that at least one head sees, bool (B, Sq, Sk), or None if unknown.
        mask: Shape and line of a dense mask or bias, and whether it is floating-point.
        mask_seconds: Time that operators took to create the mask.
        mask_biases: The mask adds other numbers than 0 to visible pairs.
        mask_sources: Tensors of the batch that the mask is made from.
        applied: Operator, line and tensor of each change of stored scores before their softmax.
        padding: The fault of the padding mask, if the call has one.
        same_in_heads: All heads see the same pairs.
        given: Arguments of torch's function.
        key: The keys, if there are more or fewer keys than queries.
        first_own: Index of the first key that is made from the batch's tokens, after the keys of a cache.
        hidden: (batch element, query) of queries without a visible key.
        result, value: The result and the values, if there are such queries.
        overflow: The number of the mask or the scores that is infinite in its dtype.
        repeated: Line that copied keys or values for more heads, and the copy's bytes.
        head_maps: Key heads of the query heads in these keys and values, None where unknown.
        copied: Line that copied q, k or v to make them contiguous, and the copy's bytes.
        upcast: Line that converted to a wider dtype.
        upcast_bytes: Bytes of q, k and v in the wider dtype.
        score_count: Number of scores, if they are stored.
        wide: Line that made scores or weights in a wider dtype than q, this dtype, and their bytes.
        softmax: The softmax of the scores was seen.
        keys: Number of score columns that are keys, or None without sinks.
        steps: Operators on scores before their softmax.
        products: Scores of one head before these operators.
        scale: Factor of the scores before their softmax, or None if it is unknown.
        in_multihead: The call is part of nn.MultiheadAttention.
        lines: All of the user's lines that lead to the call, as "file:line".
    """

    kind: str
    kernel: str
    place: Place | None
    q: tuple[int, ...]
    k: tuple[int, ...]
    dtype: torch.dtype
    recomputed: bool = False
    visible: Tensor | None = None
    mask: tuple[tuple[int, ...], Place | None, bool] | None = None
    mask_bytes: int = 0
    mask_seconds: float = 0.0
    mask_biases: bool = False
    mask_sources: frozenset[str] = frozenset()
    applied: list[tuple[str, Place | None, Tensor]] = field(default_factory=list)
    padding: Fault | None = None
    same_in_heads: bool = True
    given: tuple[Any, dict[str, Any]] | None = None
    key: Tensor | None = None
    first_own: int = 0
    hidden: list[tuple[int, int]] = field(default_factory=list)
    result: Tensor | None = None
    value: Tensor | None = None
    overflow: Overflow | None = None
    repeated: tuple[Place | None, int] | None = None
    head_maps: list[HeadMap | None] = field(default_factory=list)
    copied: tuple[Place | None, int] | None = None
    upcast: Place | None = None
    upcast_bytes: int = 0
    score_count: int = 0
    wide: tuple[Place | None, torch.dtype, int] | None = None
    softmax: bool = False
    keys: slice | None = None
    steps: set[str] = field(default_factory=set)
    products: Tensor | None = None
    scale: float | None = None
    in_multihead: bool = False
    lines: list[str] = field(default_factory=lines_here)

    @property
    def stores_scores(self) -> bool:
        """Whether a tensor (..., Sq, Sk) was stored."""
        return not self.kernel


@dataclass(eq=False)
class _Tag:
    """Facts about a storage. ``parts`` are tags of operands, ``source`` is the tensor that was repeated."""

    made: Place | None
    seconds: float
    parts: tuple[_Tag, ...] = ()
    scores: Attention | None = None
    repeated: tuple[Place | None, int] | None = None
    source: Tensor | None = None
    copied: tuple[Place | None, int] | None = None
    upcast: Place | None = None
    sources: frozenset[str] = frozenset()
    overflow: Overflow | None = None

    @property
    def all_seconds(self) -> float:
        """Time to create it and its operands. An operand that is used twice counts once."""
        found, todo = set[_Tag](), [self]
        while todo:
            tag = todo.pop()
            todo += [x for x in tag.parts if x not in found and tag not in found]
            found.add(tag)
        return sum(x.seconds for x in found)


class _Function(TorchFunctionMode):
    """Records the torch function that an operator runs for."""

    def __init__(self) -> None:
        super().__init__()
        self.given: tuple[Any, dict[str, Any]] | None = None
        self.reads: dict[Place | None, int] = {}
        self.converts = 0
        self.overflows: list[tuple[Tensor, Overflow]] = []

    def __torch_function__(self, fn: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(fn, "__name__", "")
        if name in _TO_PYTHON and any(_is_plain(x) for x in args):
            self.converts += 1  # Converting to text reads many values. It counts once.
            try:
                return fn(*args, **kwargs)
            finally:
                self.converts -= 1
                place = place_here()
                if not self.converts and not _is_own(place):
                    self.reads[place] = self.reads.get(place, 0) + 1
        if name != "scaled_dot_product_attention":
            out = fn(*args, **kwargs)
            if name == "tensor" and args and (found := overflow_of_data(args[0], out, place_here())):
                self.overflows.append((out, found))
            return out
        before, self.given = self.given, (args, kwargs)
        try:
            return fn(*args, **kwargs)
        finally:
            self.given = before

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        """Keep this mode in backward passes, in which checkpoints call torch functions again.

        torch leaves a mode while it handles a function, and it handles ``backward`` so.
        """
        autograd: Any = torch.autograd
        overrides: Any = torch.overrides
        run = autograd._engine_run_backward

        def run_in_mode(*args: Any, **kwargs: Any) -> Any:
            if self in overrides._get_current_function_mode_stack():
                return run(*args, **kwargs)
            with self:
                return run(*args, **kwargs)

        autograd._engine_run_backward = run_in_mode
        try:
            yield
        finally:
            autograd._engine_run_backward = run


class Watcher(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects attention calls, the first NaN and overflow, reads of values, and custom operators."""

    supports_higher_order_operators = True

    def __init__(self, batch: int = 1, named: Mapping[str, Tensor] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.batch, self.function = batch, _Function()
        self.calls: list[Attention] = []
        self.first_nan: tuple[str, tuple[int, ...], Place | None, bool] | None = None
        self.overflow: Overflow | None = None  # The overflow that the first NaN comes from.
        self.seconds = 0.0  # Time of all operators.
        self.reads = self.function.reads
        self.custom: dict[str, tuple[Any, Any, Any, Any, Place | None]] = {}
        self.largest = 0
        self.keeps_keys = False  # Otherwise only keys that differ in number from the queries are kept.
        self._tags: dict[int, _Tag] = {
            _storage(x): _Tag(None, 0.0, sources=frozenset([name]))
            for name, x in (named or {}).items()
            if _is_plain(x)
        }

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, start = kwargs or {}, time.perf_counter()
        out = op(*args, **kwargs)
        inputs = [x for x in tree_leaves((args, kwargs)) if _is_plain(x)]
        name, outs = _name(op), [x for x in tree_leaves(out) if _is_plain(x)]
        self._note(op, name, args, kwargs, inputs, outs, time.perf_counter() - start)
        return out

    def _note(
        self,
        op: Any,
        name: str,
        args: Any,
        kwargs: Any,
        inputs: list[Tensor],
        outs: list[Tensor],
        spent: float,
    ) -> None:
        place = _place()
        held = {_storage(x) for x in inputs}
        self.seconds += spent
        for x, found in self.function.overflows:
            self._tags.setdefault(_storage(x), _Tag(found.place, 0.0)).overflow = found
        self.function.overflows.clear()
        known = [tag for x in inputs if (tag := self._tags.get(_storage(x))) is not None]
        overflow = self._overflow(op, name, args, kwargs, outs, known, place)
        self._look_for_nan(name, inputs, outs, overflow, place)
        is_read = name in _READS or (name == "index" and any(x.dtype == torch.bool for x in inputs[1:]))
        is_read = is_read and not self.function.converts
        if is_read and not _is_own(place):
            self.reads[place] = self.reads.get(place, 0) + 1
        kind = self._fused_kind(op, name)
        if kind:
            self._fused(kind, op, args, kwargs, outs, place)
        scores = next((tag.scores for tag in known if tag.scores is not None), None)
        for x in outs:
            self.largest = max(self.largest, x.numel() * x.element_size())
            if _storage(x) not in held:
                self._tags[_storage(x)] = self._tag(name, x, inputs, known, place, spent)
            elif (tag := self._tags.get(_storage(x))) is not None:
                tag.sources = tag.sources.union(*(t.sources for t in known))
                if "_" in name[-1:]:
                    tag.seconds += spent
                    tag.parts += tuple(t for t in known if t is not tag)
            if overflow is not None and has_inf(x) and _storage(x) in self._tags:
                self._tags[_storage(x)].overflow = overflow
        if name == "copy_" and len(inputs) > 1:
            self._copied_into(inputs[0], inputs[1], place)
        if name in _PRODUCTS and len(inputs) > 1 and outs:
            self._product(inputs[-2:], outs[0], scores, place)
        elif scores is not None and not kind:
            self._on_scores(name, inputs, outs, scores, place)
        if _is_custom(op) and str(op) not in self.custom:
            self.custom[str(op)] = (op, args, kwargs, outs, place)

    def _tag(
        self, name: str, x: Tensor, inputs: list[Tensor], known: list[_Tag], place: Place | None, spent: float
    ) -> _Tag:
        # The time to create a mask includes the time to create its operands.
        like = (self._tags.get(_storage(y)) for y in inputs if y.numel() >= x.numel())
        tag = _Tag(place, spent, tuple(t for t in like if t is not None))
        tag.sources = tag.sources.union(*(t.sources for t in known))
        if x.is_floating_point() and x.dim() > 1:
            floats = [y.itemsize for y in inputs if y.is_floating_point() and y.dim() > 1]
            same = next((t.upcast for t in known if t.upcast is not None), None)
            narrow, wide = min(floats, default=0), max(floats, default=0)
            tag.upcast = place if 0 < narrow < x.itemsize else same if wide <= x.itemsize else None
        if name in _COPIES and inputs:
            size, source = x.numel() * x.element_size(), inputs[0]
            before = next((t for t in known if t.repeated), None)
            tag.repeated, tag.source = (
                (before.repeated, before.source) if before is not None else (None, None)
            )
            joins = name in ("cat", "stack")
            twice = joins and len({_storage(y) for y in inputs}) < len(inputs)
            if (not joins and x.numel() >= 2 * max(_distinct(source), 1)) or twice:
                tag.repeated, tag.source = (place, size), source.detach()
            elif name == "clone" and not source.is_contiguous() and x.is_contiguous() and is_direct():
                tag.copied = (place, size)
        return tag

    def _copied_into(self, x: Tensor, source: Tensor, place: Place | None) -> None:
        """Note a copy into memory that was made for it."""
        tag = self._tags.get(_storage(x))
        whole = x.is_contiguous() and x.numel() * x.element_size() == x.untyped_storage().nbytes()
        if tag is None or not whole or x.dim() < 3 or not is_direct():
            return
        if x.numel() >= 2 * max(_distinct(source), 1):
            tag.repeated, tag.source = (place, x.numel() * x.element_size()), source.detach()
        elif x.shape == source.shape and not source.is_contiguous():
            tag.copied = (place, x.numel() * x.element_size())

    def _product(
        self, inputs: list[Tensor], out: Tensor, scores: Attention | None, place: Place | None
    ) -> None:
        if scores is not None:
            if scores.softmax:
                self._finish(scores, inputs, out)
            return
        q, k = inputs
        if q.dim() > 2 and min(out.shape[-2:]) > 1:
            call = Attention("written out", "", place, tuple(q.shape), tuple(k.shape), q.dtype)
            if self.function.given is not None:
                call.kind, call.given = "sdpa", self.function.given
            call.in_multihead = on_stack(_MULTIHEAD)
            call.score_count, call.products = out.numel(), first_scores(out)
            call.key = k.mT if self.keeps_keys or q.shape[-2] != k.shape[-1] else None
            self._operands(call, [q, k])
            self._tags[_storage(out)].scores = call

    def _finish(self, call: Attention, inputs: list[Tensor], out: Tensor) -> None:
        """Record the second product of hand-written attention. One of its operands is the values."""
        if call in self.calls:
            return
        values = [x for x in inputs if (t := self._tags.get(_storage(x))) is None or t.scores is not call]
        self._operands(call, values)
        self._keep(call, out, values[0])
        call.recomputed = _in_backward()
        self.calls.append(call)

    @staticmethod
    def _keep(call: Attention, out: Tensor, value: Tensor) -> None:
        """Keep the result if a query sees no key."""
        if call.hidden:
            call.result, call.value = out.detach(), value.detach()

    def _operands(self, call: Attention, inputs: list[Tensor]) -> None:
        """Record how q, k or v were made."""
        for x in inputs:
            tag = self._tags.get(_storage(x))
            if tag is not None:
                call.repeated = call.repeated or tag.repeated
                if tag.repeated is not None and tag.source is not None:
                    call.head_maps.append(head_map(x.detach(), tag.source, self.batch))
                call.copied = call.copied or tag.copied
                call.upcast = call.upcast or tag.upcast
                call.upcast_bytes += x.numel() * x.element_size() if tag.upcast else 0

    def _on_scores(
        self, name: str, inputs: list[Tensor], outs: list[Tensor], call: Attention, place: Place | None
    ) -> None:
        """Follow an operator on scores or on their softmax."""
        own = [x for x in inputs if (t := self._tags.get(_storage(x))) is not None and t.scores is call]
        pairs = own[0].shape[-2:] if own[0].dim() > 1 else ()
        call.steps |= set() if call.softmax else {name.rstrip("_")}
        for x in inputs:
            changes = x.dim() > 0 and x.shape[-1:] == own[0].shape[-1:] and name in _MASKING
            if changes and not call.softmax and not any(x is y for y in own):
                call.applied.append((name, place, x.detach()))
                call.mask_sources |= self._sources(x)
            two = x.dim() > 1 and min(x.shape[-2:]) > 1 and x.shape[-2:] == pairs
            if two and not any(x is y for y in own) and not call.softmax:
                self._mask(call, x)
        if name in _SOFTMAX and not call.softmax:
            call.softmax = True
            call.overflow = self._tags[_storage(own[0])].overflow
            seen = own[0].detach()
            seen = seen if call.keys is None else seen[..., call.keys]
            self._see(call, ~(seen <= HIDDEN) if name != "exp" else None, seen)
            call.scale, call.products = scale_of(call.products, seen, HIDDEN), None
            call.hidden = call.hidden if call.keys is None else []  # These queries see their sink.
            if call.kind == "written out" and place is not None:
                call.place = place
        for x in outs:
            sinks = name == "cat" and x.dim() > 1 and x.shape[:-1] == own[0].shape[:-1] and not call.softmax
            if sinks:
                before = next(i for i, y in enumerate(inputs) if y is own[0])
                start = sum(y.shape[-1] for y in inputs[:before])
                call.keys = slice(start, start + own[0].shape[-1])
            stored = x.numel() >= own[0].numel() and not any(_storage(x) == _storage(y) for y in inputs)
            if stored and x.is_floating_point() and x.itemsize > call.dtype.itemsize:
                first, _, size = call.wide or (place, x.dtype, 0)
                call.wide = first, x.dtype, size + x.numel() * x.element_size()
            if x.numel() == own[0].numel() or sinks:
                self._tags[_storage(x)].scores = call

    def _mask(self, call: Attention, x: Tensor) -> None:
        tag = self._tags.get(_storage(x))
        call.mask = tuple(x.shape), tag.made if tag else None, x.is_floating_point()
        call.mask_bytes = _distinct(x) * x.element_size()
        call.mask_seconds = tag.all_seconds if tag else 0.0
        call.mask_sources |= self._sources(x)
        call.mask_biases = x.is_floating_point() and bool(((x != 0) & ~(x <= HIDDEN)).any())

    def _sources(self, x: Tensor) -> frozenset[str]:
        tag = self._tags.get(_storage(x))
        return tag.sources if tag is not None else frozenset()

    def _see(self, call: Attention, visible: Tensor | None, like: Tensor) -> None:
        """Store the visible pairs, (B, Sq, Sk), and the queries that see nothing."""
        if visible is None or prod(visible.shape) > _PAIRS or min(like.shape[-2:]) < 1:
            return
        visible = (
            visible.expand(*visible.shape[:-2], *like.shape[-2:]).flatten(0, -3)
            if visible.dim() > 2
            else (visible.expand(*like.shape[-2:])[None])
        )
        rows = self.batch if visible.shape[0] % self.batch == 0 else 1
        by_head = visible.reshape(rows, -1, *visible.shape[-2:])
        call.visible = by_head.any(1)
        call.same_in_heads = bool((by_head.all(1) == call.visible).all())
        call.hidden = [(int(b), int(s)) for b, s in (~call.visible.any(-1)).nonzero().tolist()]

    def _fused_kind(self, op: Any, name: str) -> str:
        if not isinstance(op, torch._ops.OpOverload):
            return "flex" if name == "flex_attention" else ""
        if "backward" in name:
            return ""
        if op.namespace == "aten":
            fused = name.startswith(("_scaled_dot_product", "_flash_attention", "_efficient_attention"))
            return "sdpa" if fused and not name.endswith("_math") else ""
        if op.namespace == "attnspan":
            return "attnspan" if name == "attention" else ""
        return "custom" if "attention" in name or "attn" in name else ""

    def _fused(
        self, kind: str, op: Any, args: Any, kwargs: Any, outs: list[Tensor], place: Place | None
    ) -> None:
        q, k, *more = inputs = [x for x in tree_leaves(args) if _is_plain(x)][:3]
        kernel = "" if kind == "flex" else str(op).removesuffix(".default")
        call = Attention(kind, kernel, place, tuple(q.shape), tuple(k.shape), q.dtype)
        call.recomputed = _in_backward()
        call.key = k if self.keeps_keys or q.shape[-2] != k.shape[-2] else None
        self._operands(call, inputs)
        if kind == "sdpa":
            self._of_sdpa(call, op, args, kwargs, q, k)
        elif kind == "flex":
            self._of_flex(call, args, kwargs, q, k)
        elif kind == "attnspan":
            self._of_attnspan(call, op, args, kwargs)
        if outs and more:
            self._keep(call, outs[0], more[0])
        self.calls.append(call)

    def _of_sdpa(self, call: Attention, op: Any, args: Any, kwargs: Any, q: Tensor, k: Tensor) -> None:
        given, call.given = _named(op, args, kwargs), self.function.given
        mask = next((given[x] for x in ("attn_mask", "attn_bias") if given.get(x) is not None), None)
        sizes, causal = (q.shape[-2], k.shape[-2]), bool(given.get("is_causal"))
        visible = torch.ones(self.batch, *sizes, dtype=torch.bool, device=q.device)
        if causal:
            visible = visible.tril()
        if mask is not None:
            source = call.given or ((), {})
            own = [x for x in tree_leaves(source) if _is_plain(x)][3:4]
            if mask.dim() > 1 and min(mask.shape[-2:]) > 1:
                # torch converts a boolean mask to floating point. The user's line made the boolean one.
                self._mask(call, own[0] if own else mask)
            tag = self._tags.get(_storage(mask))
            call.overflow = tag.overflow if tag is not None else None
            call.mask_sources |= self._sources(mask)
            shown = mask if mask.dtype == torch.bool else mask > HIDDEN
            visible = visible.unsqueeze(1) & shown.expand(*shown.shape[:-2], *sizes)
        self._see(call, visible, torch.empty(sizes, device="meta"))

    def _of_flex(self, call: Attention, args: Any, kwargs: Any, q: Tensor, k: Tensor) -> None:
        mask_mod = next((x for x in reversed(_flat(args, kwargs)) if callable(x) and not _is_plain(x)), None)
        if mask_mod is None or q.shape[-2] * k.shape[-2] * q.shape[0] > _PAIRS:
            return
        from torch.nn.attention.flex_attention import create_mask

        try:
            batch, heads, q_len = q.shape[:3]
            visible = create_mask(mask_mod, batch, heads, q_len, k.shape[-2], device=str(q.device))
        except Exception:
            return  # The function is a score_mod, or reads other data than indices.
        self._see(call, visible, torch.empty(q.shape[-2], k.shape[-2], device="meta"))

    def _of_attnspan(self, call: Attention, op: Any, args: Any, kwargs: Any) -> None:
        given = _named(op, args, kwargs)
        bounds, sizes = given.get("bounds"), (call.q[-2], call.k[-2])
        if isinstance(bounds, Tensor) and prod(sizes) * bounds.shape[0] <= _PAIRS:
            visible = torch.as_tensor(Spans(bounds, sizes[1]).dense())
            # attnspan defines the result of a query that sees nothing: 0.
            self._see(call, visible, torch.empty(sizes, device="meta"))
            call.hidden = []

    def _overflow(
        self,
        op: Any,
        name: str,
        args: Any,
        kwargs: Any,
        outs: list[Tensor],
        known: list[_Tag],
        place: Place | None,
    ) -> Overflow | None:
        """Find the overflow that infinite results come from."""
        bad = None if _is_unset(name) else next((x for x in outs if has_inf(x)), None)
        before = next((t.overflow for t in known if t.overflow is not None), None)
        return before or (None if bad is None else overflow_of(op, args, kwargs, bad, place))

    def _look_for_nan(
        self,
        name: str,
        inputs: list[Tensor],
        outs: list[Tensor],
        overflow: Overflow | None,
        place: Place | None,
    ) -> None:
        if self.first_nan is not None or _is_unset(name):
            return
        floats = [x.detach() for x in outs if x.is_floating_point() and x.numel()]
        given = [x.detach() for x in inputs if x.is_floating_point()]
        bad = [x for x in floats if bool(x.isnan().any())]
        if bad and not any(bool(x.isnan().any()) for x in given):
            self.first_nan = name, tuple(bad[0].shape), place, _in_backward()
            self.overflow = overflow


@contextmanager
def watching(batch: int = 1, named: Mapping[str, Tensor] | None = None) -> Iterator[Watcher]:
    """Watch the steps in the block. They run uncompiled, even if the model compiles parts of itself.

    Args:
        batch: Batch size.
        named: Tensors of the batch by name. Masks that are made from them depend on data.
    """
    watcher = Watcher(batch, named)
    with (
        torch.compiler.set_stance("force_eager"),
        # Needed to find the forward line of each operator of the backward pass.
        torch.autograd.set_detect_anomaly(True, check_nan=False),
        watcher.function.in_backward(),
        watcher.function,
        watcher,
    ):
        yield watcher


def _is_own(place: Place | None) -> bool:
    """Whether attnspan or the doctor reads a value below a line. Compiled code has no such reads."""
    return place is None or any(on_stack(own, place.file) for own in (_ATTNSPAN, _LAB))


def _name(op: Any) -> str:
    packet = getattr(op, "overloadpacket", None)
    return str(getattr(packet, "__name__", None) or getattr(op, "__name__", None) or op)


def _is_unset(name: str) -> bool:
    """Whether an operator returns memory that nothing was written to."""
    return name.startswith(("empty", "_empty", "new_empty"))


def _is_plain(x: Any) -> bool:
    return isinstance(x, Tensor) and x.layout == torch.strided and not x.is_meta and not x.is_nested


def _storage(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)


def _distinct(x: Tensor) -> int:
    """Count the elements that a tensor stores. Expanded dimensions count once."""
    return prod(n for n, stride in zip(x.shape, x.stride(), strict=True) if stride or n == 0)


def _flat(args: Any, kwargs: Any) -> list[Any]:
    """List arguments, and the contents of tuples among them: a BlockMask arrives as a tuple."""
    found: list[Any] = []
    for x in (*args, *kwargs.values()):
        found += list(x) if isinstance(x, tuple) else [x]
    return found


def _named(op: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    names = [str(x.name) for x in op._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def _is_custom(op: Any) -> bool:
    return isinstance(op, torch._ops.OpOverload) and op.namespace not in (
        "aten",
        "prim",
        "prims",
        "profiler",
        "inductor",
    )


def _place() -> Place | None:
    """Find the user's line: on the stack, or in a backward pass the line of the forward operator."""
    if not _in_backward() or on_stack(_CHECKPOINT):
        return place_here()
    node = torch._C._current_autograd_node()
    about: Any = {} if node is None else node.metadata
    forward = lines_in("".join(about.get("traceback_", ())))
    return forward[0] if forward else None

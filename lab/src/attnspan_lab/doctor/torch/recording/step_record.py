"""Record of a watched step: its attention calls, and how each of its tensors was made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from torch import Tensor

from attnspan_lab.doctor.places import Place, is_direct
from attnspan_lab.doctor.torch.cost.repeats import Repeats
from attnspan_lab.doctor.torch.masks.heads import head_map
from attnspan_lab.doctor.torch.masks.hiding_values import highest_hiding
from attnspan_lab.doctor.torch.numbers.overflow import Overflow
from attnspan_lab.doctor.torch.recording.attention_call import Attention
from attnspan_lab.doctor.torch.recording.functions import Function
from attnspan_lab.doctor.torch.recording.operators import Operation, distinct, is_plain, storage

__all__ = ["PAIRS", "Record", "Tag"]

#: Maximum number of pairs for which the mask is kept.
PAIRS = 2**24
_COPIES = {
    *("clone", "_reshape_copy", "repeat", "expand_copy", "contiguous", "cat", "stack"),
    *("index", "index_select", "gather"),
    # In inference mode, torch does not split these into other operators.
    *("repeat_interleave", "reshape", "flatten"),
}


@dataclass(eq=False)
class Tag:
    """Facts about a storage. ``parts`` are tags of operands, ``source`` is the tensor that was repeated."""

    made: Place | None
    seconds: float
    parts: tuple[Tag, ...] = ()
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
        found, todo = set[Tag](), [self]
        while todo:
            tag = todo.pop()
            todo += [x for x in tag.parts if x not in found and tag not in found]
            found.add(tag)
        return sum(x.seconds for x in found)


class Record:
    """State of a watched step.

    Attributes:
        batch: Batch size.
        function: The watcher of torch functions.
        calls: Attention calls so far.
        tags: Facts about each storage.
        repeats: Products that are computed again.
        keeps_keys: Keep the keys of each call. Otherwise only keys that differ in number from the queries
            are kept.
    """

    def __init__(self, batch: int, named: Mapping[str, Tensor] | None) -> None:
        self.batch, self.function, self.repeats = batch, Function(), Repeats()
        self.calls: list[Attention] = []
        self.keeps_keys = False
        self.tags: dict[int, Tag] = {
            storage(x): Tag(None, 0.0, sources=frozenset([name]))
            for name, x in (named or {}).items()
            if is_plain(x)
        }

    def tag(self, operation: Operation, x: Tensor, known: list[Tag]) -> Tag:
        """Describe how an operator made a tensor from tensors with known tags."""
        place, inputs, name = operation.place, operation.inputs, operation.name
        # The time to create a mask includes the time to create its operands.
        like = (self.tags.get(storage(y)) for y in inputs if y.numel() >= x.numel())
        tag = Tag(place, operation.seconds, tuple(t for t in like if t is not None))
        tag.sources = tag.sources.union(*(t.sources for t in known))
        if x.is_floating_point() and x.dim() > 1:
            floats = [y.itemsize for y in inputs if y.is_floating_point() and y.dim() > 1]
            same = next((t.upcast for t in known if t.upcast is not None), None)
            narrow, wide = min(floats, default=0), max(floats, default=0)
            tag.upcast = place if 0 < narrow < x.itemsize else same if wide <= x.itemsize else None
        if name in _COPIES and inputs and x.is_floating_point():
            before = next((t for t in known if t.repeated), tag)
            tag.repeated, tag.source = before.repeated, before.source
            joins = name in ("cat", "stack")
            twice = joins and len({storage(y) for y in inputs}) < len(inputs)
            self._copied(tag, x, inputs[0], place, repeats=twice if joins else None, keeps=name == "clone")
        return tag

    def copied_into(self, operation: Operation) -> None:
        """Note a copy into memory that was made for it."""
        x, source = operation.inputs[:2]
        tag = self.tags.get(storage(x))
        whole = x.is_contiguous() and x.nbytes == x.untyped_storage().nbytes()
        if tag is not None and whole and x.dim() >= 3 and is_direct():
            self._copied(tag, x, source, operation.place, keeps=x.shape == source.shape)

    def _copied(
        self,
        tag: Tag,
        x: Tensor,
        source: Tensor,
        place: Place | None,
        *,
        repeats: bool | None = None,
        keeps: bool,
    ) -> None:
        """Note a copy that repeats its source, or that only makes it contiguous.

        Args:
            tag: Tag of the copy.
            x, source, place: The copy, the tensor that was copied, and the line.
            repeats: Whether entries were repeated. Default: the copy has twice as many entries, or more.
            keeps: The operator may have copied the tensor only to make it contiguous.
        """
        # One tensor that all batch elements share, such as learned queries, is repeated for no head.
        is_shared = source.dim() > 2 and source.stride(0) == 0 and len(source) == self.batch
        stored = max(distinct(source) * (self.batch if is_shared else 1), 1)
        if x.numel() >= 2 * stored if repeats is None else repeats:
            tag.repeated, tag.source = (place, x.nbytes), source.detach()
        elif keeps and not source.is_contiguous() and x.is_contiguous() and is_direct():
            tag.copied = (place, x.nbytes)

    def tag_of(self, x: Tensor) -> Tag:
        """Look up the facts about a tensor's storage. They are empty if no watched operator made it."""
        return self.tags.get(storage(x)) or Tag(None, 0.0)

    def operands(self, call: Attention, inputs: list[Tensor], query: Tensor | None = None) -> None:
        """Record how q, k or v were made. No head shares the query with other heads."""
        for x in inputs:
            tag = self.tag_of(x)
            call.repeated = call.repeated or (None if x is query else tag.repeated)
            if tag.repeated is not None and tag.source is not None and x is not query:
                call.head_maps.append(head_map(x.detach(), tag.source, self.batch))
            call.copied = call.copied or tag.copied
            call.upcast = call.upcast or tag.upcast
            call.upcast_bytes += x.nbytes if tag.upcast else 0

    def mask(self, call: Attention, x: Tensor, limit: float | None = None) -> None:
        """Record the dense mask of a call. Numbers at or below the limit hide, and others are a bias."""
        tag = self.tag_of(x)
        call.mask = tuple(x.shape), tag.made, x.is_floating_point()
        if x.stride(-1) and x.stride(
            -2
        ):  # A view that repeats a row or a column stores no entry for each pair.
            call.mask_bytes, call.mask_seconds = distinct(x) * x.itemsize, tag.all_seconds
        call.mask_sources |= tag.sources
        if x.is_floating_point():
            limit = highest_hiding(x) if limit is None else limit
            call.mask_biases = call.mask_biases or bool(((x != 0) & ~(x <= limit)).any())

    def see(self, call: Attention, visible: Tensor | None) -> None:
        """Store the visible pairs, (B, Sq, Sk), and the queries that see nothing."""
        if visible is None or prod(visible.shape) > PAIRS or min(visible.shape[-2:]) < 1:
            return
        # Groups of tokens, such as windows, are elements of the first dim.
        has_groups = visible.dim() == 4 and len(visible) % self.batch == 0
        groups = len(visible) if has_groups else self.batch
        visible = visible.flatten(0, -3) if visible.dim() > 2 else visible[None]
        rows = groups if visible.shape[0] % groups == 0 else 1
        by_head = visible.reshape(rows, -1, *visible.shape[-2:])
        call.visible = by_head.any(1)
        call.same_in_heads = bool((by_head.all(1) == call.visible).all())
        call.hidden = [(int(b), int(s)) for b, s in (~call.visible.any(-1)).nonzero().tolist()]

    @staticmethod
    def keep(call: Attention, out: Tensor, value: Tensor) -> None:
        """Keep the result if a query sees no key."""
        if call.hidden:
            call.result, call.value = out.detach(), value.detach()

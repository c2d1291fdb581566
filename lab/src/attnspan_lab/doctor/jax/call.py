"""The record of one attention call of a watched step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from attnspan_lab.doctor.places import Place

if TYPE_CHECKING:
    from attnspan_lab.doctor.jax.values import Axes, Value

__all__ = ["Attention", "Returned"]

_WRITTEN = {"written out": "written out, which stores all scores", "in blocks": "written out in blocks"}


@dataclass(eq=False)
class Returned:
    """Results of an attention call.

    Attributes:
        rows: Results (B, D, Sq).
        nan, zero, even: Queries (B, Sq) whose results are NaN, are 0, or are the mean of all values.
    """

    rows: np.ndarray
    nan: np.ndarray
    zero: np.ndarray
    even: np.ndarray


@dataclass(eq=False)
class Attention:
    """One attention call.

    Attributes:
        kind: "written out", "in blocks" (a loop over parts of the keys or queries), "attnspan" or "fused".
        places: The user's lines, of hand-written attention the lines of the second product.
        lines: The innermost lines of both products.
        operands: q, k and v.
        masks: Arrays that were combined with the scores, with their axes.
        dropout: Whether random numbers drop weights between the softmax and the values.
        softmax: Whether an exponential of the scores was seen.
        visible: Visible pairs of any head, bool (B, Sq, Sk), or None if unknown.
        hidden: Queries (B, Sq) whose scores are all hidden.
        out: What the queries return.
        scores: Shape and bytes of the scores.
        pairs: Masks that differ between queries and between keys.
        varies: All masks, and whether they differ between queries and between keys.
        by_head: Whether heads see different pairs.
        layouts: Layouts of q, k and v, as far as the products show them.
        depth: Number of loops around the call.
        softmaxed: Input of the softmax.
        size: Head dim of q and k.
        factor: The number by which a kernel multiplies the scores, if it is known.
        uneven: Whether the softmax runs over another axis than the keys.
    """

    kind: str
    places: tuple[Place, ...]
    operands: list[Value]
    lines: set[Place] = field(default_factory=set)
    masks: list[tuple[Value, Axes]] = field(default_factory=list)
    softmax: bool = False
    dropout: bool = False
    seen: tuple[Any, Axes] | None = None
    keys: slice | None = None
    visible: np.ndarray | None = None
    hidden: np.ndarray | None = None
    out: Returned | None = None
    scores: tuple[tuple[int, ...], int] = ((), 0)
    pairs: list[Value] = field(default_factory=list)
    varies: list[tuple[Value, bool, bool]] = field(default_factory=list)
    by_head: bool = False
    layouts: set[str] = field(default_factory=set)
    depth: int = 0
    softmaxed: Value | None = None
    size: int = 0
    factor: float | None = None
    uneven: bool = False

    @property
    def kernel(self) -> str:
        """Name of the kernel, or that the call is written out."""
        return _WRITTEN.get(self.kind, self.kind)

    @property
    def with_masks(self) -> tuple[Place, ...]:
        """The lines of the call, and of the masks of pairs."""
        return (*self.places[:2], *(x for y in self.pairs for x in y.places[:1]))

    @property
    def padding(self) -> np.ndarray | None:
        """Queries (B, S) that see no key, and whose key no query sees. None: unknown, or other keys."""
        if self.hidden is None or self.visible is None or self.visible.shape[1] != self.visible.shape[2]:
            return None
        return self.hidden & ~self.visible.any(1)

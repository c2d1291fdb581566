"""Positions that a 16-bit float counts: different positions become equal, or their angles are rounded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attnspan_lab.doctor.coverage import Coverage
from attnspan_lab.doctor.digits import CLOSE, collisions, neighbors, rounded
from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.places import Place, at, place_here
from attnspan_lab.doctor.torch.recording.calls import Step
from attnspan_lab.doctor.torch.recording.operators import is_plain, operator_name

__all__ = ["counting_findings"]

_FEW = "A float of 16 bits has too few digits for these numbers, so neighboring positions become equal"

_REMEDY = (
    "Count positions and compute angles in float32, also if the model is converted as a whole: "
    "torch.arange(n, dtype=torch.float32), and inv_freq.float(). Convert the sines and cosines"
)
_TOPIC = "digits of positions"
_NARROW = (torch.float16, torch.bfloat16)


class _Angles(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records sines and cosines of angles, and lines that count in a 16-bit float."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counted: list[tuple[str, Place | None]] = []
        self.rounded: list[tuple[str, Place | None]] = []
        self.exact = False

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        name = operator_name(op).strip("_")
        if name in ("arange", "to_copy") and is_plain(out) and out.dtype in _NARROW:
            source = next((x for x in tree_leaves(args) if is_plain(x)), None)
            if said := _collisions(out, source):
                self.counted.append((said, place_here()))
        elif name in ("sin", "cos") and is_plain(args[0]) and args[0].dim() > 1:
            self._angle(args[0])
        return out

    def _angle(self, angles: Tensor) -> None:
        most = float(angles.detach().abs().max()) if angles.numel() else 0.0
        step = neighbors(most, torch.finfo(angles.dtype).eps) if angles.dtype in _NARROW else 0.0
        if step > CLOSE:
            self.rounded.append((rounded(angles.dtype, step), place_here()))
        elif most > CLOSE:
            self.exact = True


def counting_findings(step: Step, coverage: Coverage) -> Iterator[Finding]:
    """Yield lines that count positions, or make angles of them, in a float of 16 bits.

    Args:
        step: The step.
        coverage: Collects the checks.
    """
    angles = _Angles()
    step.again(mode=angles)
    if not angles.rounded and not (angles.counted and angles.exact):
        if angles.exact:
            coverage.made(_TOPIC, "angles of positions are computed in 32 bits or more")
        return
    what, place = (angles.counted or angles.rounded)[0]
    cause = _FEW if angles.counted else "Large angles are computed in 16 bits before their sine and cosine"
    places = at(place, *(x for _, x in angles.rounded[:1]))
    yield Finding("positions", what, places, cause=cause, remedy=_REMEDY)


def _collisions(out: Tensor, source: Tensor | None) -> str:
    """Describe numbers that count up and that the dtype does not distinguish."""
    made = torch.arange(out.numel()) if source is None else source.detach()
    if made.dtype in _NARROW or not 2 < made.numel() <= 1 << 20 or (source is None and out.dim() != 1):
        return ""
    whole = torch.unique(made.double())
    many, distinct = len(whole), len(torch.unique(whole.to(out.dtype)))
    counts = many > 2 and torch.equal(whole, whole[0].round() + torch.arange(many))
    return collisions(out.dtype, distinct, many) if counts and distinct < many else ""

"""Findings with JAX's causes and remedies."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnspan_lab.doctor.findings import KINDS, Finding
from attnspan_lab.doctor.places import Place

if TYPE_CHECKING:
    from attnspan_lab.doctor.jax.call import Attention

__all__ = ["finding"]

_TEXTS = tomllib.loads((Path(__file__).parent / "texts.toml").read_text(encoding="utf-8"))


def finding(
    kind: str,
    what: str,
    places: Iterable[Place | None] = (),
    *,
    call: Any = None,
    **more: Any,
) -> Finding:
    """Make a finding. Default: the cause and the remedy that the kind has for JAX.

    Args:
        kind, what, places: Of the finding.
        call: `Attention` of the finding, or None. If a remedy names attnspan, it states the layout.
        more: Other fields.
    """
    told = {"remedy": KINDS[kind].remedy} | _TEXTS.get(kind, {}) | {k: v for k, v in more.items() if v}
    if call is not None and "attnspan" in told["remedy"]:
        told["remedy"] += f". {_layout(call)}"
    return Finding(kind, what, tuple(dict.fromkeys(x for x in places if x is not None)), **told)


def _layout(call: Attention) -> str:
    """Say in which layout attnspan gets the arrays of a call. attnspan's default is "bhsd"."""
    if call.kind == "attnspan":
        return "Keep the call's layout"
    orders = call.layouts - {""}
    if len(orders) == 1:
        (order,) = orders
        dims = ", ".join(order.upper())
        return f'Pass layout="{order}" to attnspan, because q, k and v are ({dims}) here'
    return 'Bring q, k and v to (B, S, H, D), and pass layout="bshd" to attnspan'

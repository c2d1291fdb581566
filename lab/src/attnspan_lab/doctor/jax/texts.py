"""Findings with JAX's causes and remedies."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnspan_lab.doctor.findings import KINDS, Finding
from attnspan_lab.doctor.places import Place, at

if TYPE_CHECKING:
    from attnspan_lab.doctor.jax.call import Attention

__all__ = ["finding", "noted"]

_TEXTS = tomllib.loads((Path(__file__).parent / "texts.toml").read_text(encoding="utf-8"))


def finding(
    case: str,
    what: str,
    places: Iterable[Place | None] = (),
    *evidence: str,
    values: Any = None,
    call: Any = None,
    **more: Any,
) -> Finding:
    """Make a finding. Default: the cause and the remedy that the case has for JAX.

    Args:
        case: A kind, or a case of a kind in texts.toml, such as "constant.captured".
        what, places, evidence: Of the finding. An empty text is no evidence.
        values: Dict of the values in the texts of the case.
        call: `Attention` of the finding, or None. If a remedy names attnspan, it states the layout.
        more: Other fields. An empty text stands for the default.
    """
    kind, _, name = case.partition(".")
    known = _TEXTS.get(kind, {})
    said = {k: x.format_map(values or {}) for k, x in known[name].items()} if name else {}
    told: dict[str, Any] = {"remedy": KINDS[kind].remedy}
    told |= (
        {k: x for k, x in known.items() if isinstance(x, str)} | said | {k: x for k, x in more.items() if x}
    )
    if call is not None and "attnspan" in told["remedy"]:
        told["remedy"] += f". {_layout(call)}"
    return Finding(kind, what, at(*places), tuple(filter(None, evidence)), **told)


def noted(*, confirmed: bool) -> dict[str, str]:
    """Return the severity of a finding that no trial confirmed, as a field of `finding`."""
    return {} if confirmed else {"severity": "note"}


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

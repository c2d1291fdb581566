"""Findings with JAX's causes and remedies."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.places import Place

__all__ = ["finding"]

_TEXTS = tomllib.loads((Path(__file__).parent / "texts.toml").read_text(encoding="utf-8"))


def finding(kind: str, what: str, places: Iterable[Place | None] = (), **more: Any) -> Finding:
    """Make a finding. Default: the cause and the remedy that the kind has for JAX."""
    told = _TEXTS.get(kind, {}) | {k: v for k, v in more.items() if v}
    return Finding(kind, what, tuple(dict.fromkeys(x for x in places if x is not None)), **told)

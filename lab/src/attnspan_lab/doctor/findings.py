"""Findings of the doctor, with evidence, cause and remedy, as plain data."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from attnspan_lab.doctor.places import Place

__all__ = [
    "KINDS",
    "Diagnosis",
    "Finding",
    "Kind",
    "merged",
]


class Kind(NamedTuple):
    """Severity of a kind of finding, with its usual cause and remedy."""

    severity: str
    cause: str = ""
    remedy: str = ""


_FILE = Path(__file__).parent / "kinds.toml"
#: Kinds of findings by name, the most severe first.
KINDS = {name: Kind(**said) for name, said in tomllib.loads(_FILE.read_text(encoding="utf-8")).items()}


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Args:
        kind: One of `KINDS`.
        what: What happens, in a sentence.
        cause: Why; by default what the kind says.
        remedy: What to do about it; by default what the kind says.
        places: Lines of the user's code, the most telling first.
        evidence: Figures and lines of output.
        tried: What the doctor changed to test the remedy, and what came of it.
        known: Reports of the same upstream.
        count: How often it was seen.
        stage: Where: "eager", "compiled", "parity", "ranks", ...
    """

    kind: str
    what: str
    places: tuple[Place, ...] = ()
    evidence: tuple[str, ...] = ()
    cause: str = ""
    remedy: str = ""
    tried: str = ""
    known: tuple[str, ...] = ()
    count: int = 1
    stage: str = ""

    def __post_init__(self) -> None:
        for name in ("cause", "remedy"):
            object.__setattr__(self, name, getattr(self, name) or getattr(KINDS[self.kind], name))

    @property
    def severity(self) -> str:
        """One of "stops", "wrong", "compile", "slow" and "note"."""
        return KINDS[self.kind].severity

    @property
    def label(self) -> tuple[str, str]:
        """Its kind and line; where no line is known, what happens."""
        return self.kind, str(self.places[0]) if self.places else self.what

    @property
    def fails(self) -> bool:
        """Whether it is more than a cost."""
        return self.severity in ("stops", "wrong", "compile")


@dataclass(frozen=True)
class Diagnosis:
    """All that one examination found.

    Args:
        subject: What was examined.
        findings: The most severe first.
        facts: Figures by stage: graphs, compilations, calls of attention, times.
        environment: Machine and versions.
        cells: Of the matrix of features, if it was run: features, and "" or what failed.
        seconds: That all of it took.
        complete: False if it was interrupted.
    """

    subject: str
    findings: tuple[Finding, ...] = ()
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    cells: tuple[dict[str, str], ...] = ()
    seconds: float = 0.0
    complete: bool = True


def merged(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """One finding for each kind, cause and line, the most severe first; of equals, the one seen first."""
    found: dict[tuple[Any, ...], Finding] = {}
    for x in findings:
        key = (x.kind, x.cause, x.places[:1] or x.what)
        same = found.get(key)
        found[key] = replace(same, count=same.count + x.count) if same else x
    order = list(KINDS)
    return tuple(sorted(found.values(), key=lambda x: order.index(x.kind)))

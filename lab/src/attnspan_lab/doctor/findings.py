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
    "texts_of",
]


class Kind(NamedTuple):
    """Severity of a kind of finding, with its usual cause and remedy."""

    severity: str
    cause: str = ""
    remedy: str = ""


_FILE = Path(__file__).parent / "kinds.toml"
_SAID = tomllib.loads(_FILE.read_text(encoding="utf-8"))
#: All kinds of findings with their names, the most severe first.
KINDS = {name: Kind(**{k: x for k, x in said.items() if isinstance(x, str)}) for name, said in _SAID.items()}

# Findings of the compiler that limits count. A compilation that fails is no cost.
_LIMITED = ("graph-break", "recompile", "recompile-limit")


@dataclass(frozen=True)
class Finding:
    """One problem of the model.

    Args:
        kind: One of `KINDS`.
        what: The problem, in a sentence.
        cause: Reason of the problem. Default: the kind's cause.
        remedy: Suggested fix. Default: the kind's remedy.
        places: Lines of the user's code, the most telling first.
        evidence: Measurements and lines of output.
        tried: The change with which the doctor tested the remedy, and the outcome.
        known: Upstream issues about the same problem.
        count: Number of occurrences.
        cost: Bytes that all occurrences store, or 0 if the finding names none.
        stage: Stage that found it: "eager", "compiled", "parity", "ranks", ...
        severity: One of "stops", "wrong", "compile", "slow" and "note". Default: the kind's severity.
            A finding that no trial confirmed is a "note".
        others: Findings that the same remedy mends, the most expensive first.
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
    cost: int = 0
    stage: str = ""
    severity: str = ""
    others: tuple[Finding, ...] = ()

    def __post_init__(self) -> None:
        for name in ("cause", "remedy"):
            object.__setattr__(self, name, getattr(self, name) or getattr(KINDS[self.kind], name))
        object.__setattr__(self, "severity", self.severity or KINDS[self.kind].severity)

    @property
    def label(self) -> tuple[str, str]:
        """Kind and line of the finding, or kind and text if the line is unknown."""
        return self.kind, str(self.places[0]) if self.places else self.what

    @property
    def key(self) -> tuple[Any, ...]:
        """Kind, severity, cause and line: findings that share these are shown as one."""
        return self.kind, self.severity, self.cause, self.places[:1] or self.what

    def fails(self, *, limited: bool) -> bool:
        """Whether the finding makes the exit status 1.

        Args:
            limited: The user passed limits. These decide about everything that only costs.
        """
        if self.severity in ("stops", "wrong"):
            return True
        return self.severity == "compile" and not (limited and self.kind in _LIMITED)


@dataclass(frozen=True)
class Diagnosis:
    """Findings and measurements of one examination.

    Args:
        subject: Name of the model or script.
        findings: Findings, the most severe first.
        facts: Measurements by stage: graphs, compilations, attention calls, times.
        environment: Machine and versions.
        cells: Tested combinations of features, each with "" or its failure.
        seconds: Duration of the examination.
        complete: False if the examination was interrupted.
    """

    subject: str
    findings: tuple[Finding, ...] = ()
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    cells: tuple[dict[str, str], ...] = ()
    seconds: float = 0.0
    complete: bool = True


def texts_of(kind: str, case: str) -> tuple[str, str]:
    """Return the cause and the remedy of a case of a kind. An empty text stands for the kind's own text."""
    said = _SAID[kind][case]
    return said.get("cause", ""), said.get("remedy", "")


def merged(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Merge findings of the same kind, cause and line. Sort them by severity, then by order of occurrence."""
    found: dict[tuple[Any, ...], Finding] = {}
    for x in findings:
        same = found.get(x.key)
        found[x.key] = replace(same, count=same.count + x.count, cost=same.cost + x.cost) if same else x
    order = list(KINDS)
    return tuple(sorted(found.values(), key=lambda x: (x.severity == "note", order.index(x.kind))))

"""Findings on two attention calls of which a step uses only one: both are computed."""

from __future__ import annotations

from typing import Any

import numpy as np

from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.jax.texts import finding
from attnspan_lab.doctor.jax.values import Value
from attnspan_lab.doctor.places import Place
from attnspan_lab.doctor.words import counted

__all__ = ["Selected"]


class Selected:
    """Notes choices between two results of attention by one condition for the whole batch."""

    def __init__(self) -> None:
        self.sites: dict[tuple[Place, ...], int] = {}

    def see(self, eqn: Any, values: list[Value], out: list[Value]) -> None:
        """Look at one operator. Results of attention are known with values of 1."""
        if eqn.primitive.name != "select_n" or len(values) != 3:
            return
        condition, *results = values
        whole = min(x.size for x in condition.chain()) == 1
        if whole and all(x.ones is not None for x in results) and _differ(*results):
            self.sites[out[0].places[:2]] = self.sites.get(out[0].places[:2], 0) + 1

    def findings(self) -> list[Finding]:
        """Describe the choices of each line."""
        what = "Two attention calls run here, and one of the two results is thrown away"
        return [
            finding("discarded", what, at, evidence=(f"{counted(n, 'choice')} a step",), count=n)
            for at, n in self.sites.items()
        ]


def _differ(one: Value, other: Value) -> bool:
    return not np.array_equal(np.asarray(one.array), np.asarray(other.array))

"""Findings on two attention calls of which a step uses only one: both are computed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
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
        self.sites: Counter[tuple[Place, ...]] = Counter()

    def see(self, eqn: Any, values: list[Value], out: list[Value]) -> None:
        """Look at one operator. Results of attention are known with values of 1."""
        if eqn.primitive.name != "select_n" or len(values) != 3:
            return
        condition, *results = values
        whole = min(x.size for x in condition.chain()) == 1
        if whole and all(x.ones is not None for x in results):
            one, other = (np.asarray(x.array) for x in results)
            self.sites[out[0].places[:2]] += not np.array_equal(one, other)

    def findings(self) -> Iterator[Finding]:
        """Yield the choices of each line."""
        what = "Two attention calls run here, and one of the two results is thrown away"
        for places, many in (+self.sites).items():
            yield finding("discarded", what, places, f"{counted(many, 'choice')} a step", count=many)

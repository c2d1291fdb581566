"""Findings on random keys that a step uses twice: layers or steps get equal random numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.grouped import grouped
from attnspan_lab.doctor.jax.texts import finding
from attnspan_lab.doctor.jax.values import Value
from attnspan_lab.doctor.places import Place
from attnspan_lab.doctor.words import counted

__all__ = ["Drawn"]


class Drawn:
    """Notes the key and the shape of all random numbers of a step."""

    def __init__(self) -> None:
        self.draws: dict[Any, list[tuple[Place, ...]]] = {}

    def see(self, eqn: Any, values: list[Value], out: list[Value]) -> None:
        """Look at one operator. The caller leaves out the backward pass, which draws again on purpose."""
        if eqn.primitive.name == "random_bits":
            data = np.asarray(jax.random.key_data(values[0].array))
            shape = np.shape(out[0].array)
            self.draws.setdefault((data.tobytes(), shape), []).append(out[0].places)

    def findings(self) -> Iterator[Finding]:
        """Yield keys that several draws of one shape share, once for each line."""
        same = [(x, shape) for (_, shape), x in self.draws.items() if len(x) > 1 and np.prod(shape) > 1]
        for site in grouped(same, lambda x: frozenset(y[:1] for y in x[0])).values():
            (draws, shape), many = site[0], len(site[0][0])
            places = [*draws[0][:2], *(x for y in draws[1:] for x in y[:1])]
            what = f"{counted(many, 'draw')} of random numbers in one step use the same key"
            equal = f"{many} arrays of shape {shape} with equal random numbers"
            keys = f"{len(site)} keys are used so" if len(site) > 1 else ""
            yield finding("reused-key", what, places, equal, keys, count=many)

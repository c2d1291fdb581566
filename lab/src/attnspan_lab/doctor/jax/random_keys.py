"""Findings on random keys that a step uses twice: layers or steps get equal random numbers."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from attnspan_lab.doctor.findings import Finding
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

    def findings(self) -> list[Finding]:
        """Describe keys that several draws of one shape share, once for each line."""
        sites: dict[Any, list[tuple[int, tuple[int, ...], list[tuple[Place, ...]]]]] = {}
        for (_, shape), draws in self.draws.items():
            if len(draws) > 1 and np.prod(shape) > 1:
                sites.setdefault(tuple(sorted({str(x[:1]) for x in draws})), []).append(
                    (len(draws), shape, draws)
                )
        found = []
        for site in sites.values():
            many, shape, draws = site[0]
            places = [*draws[0][:2], *(x for y in draws[1:] for x in y[:1])]
            what = f"{counted(many, 'draw')} of random numbers in one step use the same key"
            evidence = [f"{many} arrays of shape {shape} with equal random numbers"]
            evidence += [f"{len(site)} keys are used so"] if len(site) > 1 else []
            found.append(finding("reused-key", what, places, evidence=tuple(evidence), count=many))
        return found

"""Each mask of the tests' samples, and random trees of them, lowered: for round trips."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

import numpy as np
from samples.library import LIBRARY
from samples.masks import KEYS, SAMPLES

import attnspan as a


@dataclass(frozen=True, eq=False)
class Lowered:
    """A mask for its sizes, and its pairs, bool (B|1, H|1, q_len, k_len)."""

    name: str
    mask: a.Mask
    dense: np.ndarray

    def options(self) -> dict[str, int]:
        q_len, k_len = self.dense.shape[2:]
        return {"q_len": q_len, "k_len": k_len}


def _lowered(name: str, mask: a.Mask, q_len: int, k_len: int, **sizes: int) -> Lowered:
    found = mask.prepare(q_len, k_len, **sizes)
    return Lowered(name, found, found.dense())


@functools.cache
def every_mask() -> list[Lowered]:
    """Samples in order, then 150 trees of two to four of them."""
    found = [_lowered(x.name, x.mask(), x.q_len, x.keys, **x.sizes) for x in (*SAMPLES, *LIBRARY)]
    rng = np.random.default_rng(0)
    leaves = [x for x in SAMPLES if x.rows is None and x.keys == KEYS and not re.search("cache", x.name)]
    for n in range(150):
        chosen = [leaves[i] for i in rng.integers(0, len(leaves), rng.integers(2, 5))]
        mask, name = chosen[0].mask(), chosen[0].name
        for x in chosen[1:]:
            both = rng.random() < 0.5
            mask, name = (mask & x.mask() if both else mask | x.mask()), f"({name}) {'|&'[both]} {x.name}"
        found.append(_lowered(f"{n}: {name}", mask, KEYS, KEYS, batch=2))
    return found

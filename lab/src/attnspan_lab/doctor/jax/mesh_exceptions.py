"""Differences between a mesh and one device that are no fault: fixed sizes, and orders of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import combinations

import numpy as np

from attnspan_lab.doctor.jax.float64_reference import difference
from attnspan_lab.doctor.jax.one_device import Alone, NotAlone
from attnspan_lab.doctor.jax.subject import Traced, wide

__all__ = ["WITHIN", "excused", "orders", "results_of"]

WITHIN = 1e-3  # relative difference between the mesh and one device
_MOST_NUMBERS = 3  # numbers whose 7 combinations are tried


def results_of(traced: Traced) -> list[np.ndarray]:
    """Run a step, and list its floating-point results."""
    return wide(traced.run(*traced.leaves))


def excused(single: Alone, mesh: list[np.ndarray], size: tuple[int, int] | None) -> bool:
    """Whether the results of a mesh are right, although they differ from the step on one device.

    Args:
        single: The step on one device.
        mesh: Results of the mesh.
        size: Numbers of batch elements and tokens.

    Raises:
        NotAlone: Too many numbers of the step may be the number of devices.
    """
    if len(single.numbers) > _MOST_NUMBERS:
        lines = ", ".join(dict.fromkeys(str(x.line) for _, x in single.numbers if x is not None))
        raise NotAlone(f"numbers in shard_map may be the number of devices (lines {lines})")
    counts = range(1, len(single.numbers) + 1)
    for chosen in (x for n in counts for x in combinations(single.numbers, n)):
        if difference(mesh, results_of(single.without(list(chosen)))) <= WITHIN:
            return True
    known = orders(single.sizes, 0 if size is None else size[1])
    return any(_is_order(single.traced, mesh, size, x) for x in known)


def orders(sizes: Iterable[int], length: int) -> Iterator[np.ndarray]:
    """Yield the positions of tokens in orders that balance causal work between so many devices."""
    for n in sizes if length else ():
        if length % n == 0:
            yield np.arange(length).reshape(-1, n).T.ravel()  # Each device has every n-th token.
        if length % (2 * n) == 0:
            chunks = np.arange(length).reshape(2 * n, -1)  # Each has a chunk of the front and of the end.
            yield np.concatenate([chunks[[i, 2 * n - 1 - i]].ravel() for i in range(n)])


def _is_order(traced: Traced, mesh: list[np.ndarray], size: tuple[int, int] | None, at: np.ndarray) -> bool:
    """Whether the batch has its tokens in this order, and the mesh computes the right results for it."""
    back = np.argsort(at)
    leaves = [
        np.asarray(x)[:, back] if i >= traced.variables and np.shape(x)[:2] == size else x
        for i, x in enumerate(traced.leaves)
    ]
    found = [x[:, at] if x.shape[:2] == size else x for x in results_of(replace(traced, leaves=leaves))]
    return difference(mesh, found) <= WITHIN

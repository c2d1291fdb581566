"""Findings on slices that begin too late: XLA moves the start of the slice without an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.jax.float64_reference import difference
from attnspan_lab.doctor.jax.texts import finding
from attnspan_lab.doctor.jax.values import Value, is_float, is_key
from attnspan_lab.doctor.places import Place
from attnspan_lab.doctor.words import counted

__all__ = ["Clamped", "clamped"]

_WITHIN, _ROUNDINGS = 1e-4, 8  # relative change of results, and roundings of their dtype, that say nothing
_MOST = 4  # lines that are tried. Each trial runs the step again.
_SLICES = {"dynamic_slice": "read", "dynamic_update_slice": "write"}


class Clamped:
    """Notes slices whose start XLA moves.

    Args:
        changed: Lines whose clamped slices get other numbers, to see whether results depend on them.

    Attributes:
        sites: For each operator and line: number of clamped slices, and the first one in words.
    """

    def __init__(self, changed: set[Any] | None = None) -> None:
        self.changed = changed or set()
        self.sites: dict[tuple[str, tuple[Place, ...]], tuple[int, str]] = {}

    def see(self, eqn: Any, values: list[Value], out: list[Value]) -> None:
        """Look at one operator."""
        name = eqn.primitive.name
        if name not in _SLICES:
            return
        first = 2 if name == "dynamic_update_slice" else 1
        dims, starts = np.shape(values[0].array), [int(x.array) for x in values[first:]]
        sizes = np.shape(values[1].array) if first == 2 else eqn.params["slice_sizes"]
        # A slice of an axis with one entry, such as a broadcast axis, has only one possible start.
        axes = enumerate(zip(dims, starts, sizes, strict=True))
        bad = [i for i, (n, s, d) in axes if n > 1 and not 0 <= s <= n - d]
        if not bad:
            return
        axis, site = bad[0], (name, out[0].places)
        many, said = self.sites.get(site, (0, ""))
        end = starts[axis] + sizes[axis]
        said = said or f"entries {starts[axis]} to {end - 1} of {dims[axis]} on axis {axis} of {dims}"
        self.sites[site] = many + 1, said
        if site in self.changed:
            out[0].array = _other(out[0].array)


def clamped(
    seen: Clamped, results: list[Value], again: Callable[[set[Any]], tuple[Any, list[Value]]]
) -> Iterator[Finding]:
    """Yield the clamped slices that results depend on.

    Args:
        seen: Clamped slices of the step.
        results: The step's results.
        again: Runs the step with other numbers in some clamped slices. Returns the watcher and the results.
    """
    dtypes = {x.array.dtype for x in results if is_float(x.array)}
    eps = (float(jnp.finfo(x).eps) for x in dtypes)  # type: ignore[no-untyped-call]
    within = max([_WITHIN, *(_ROUNDINGS * x for x in eps)])
    for site, (many, said) in list(seen.sites.items())[:_MOST]:
        change = difference(_numbers(again({site})[1]), _numbers(results))
        if not change > within:
            continue
        name, places = site
        what = f"A {_SLICES[name]} beyond the end of an array: {name} moves the slice to the front"
        evidence = (
            f"{said}; {counted(many, 'such slice')} a step",
            f"other numbers in these slices change results by {change:.1e} (relative error)",
        )
        # A window may rely on the moved start of a read.
        severity = "note" if name == "dynamic_slice" else ""
        yield finding("clamped-slice", what, places[:3], *evidence, count=many, severity=severity)


def _other(array: Any) -> Any:
    """Return other numbers of the same shape. Random keys stay."""
    if is_key(array):
        return array
    array = np.asarray(array)
    if array.dtype == bool:
        return ~array
    # One number more in all scores of a query would change nothing.
    more = 1 + np.arange(array.size).reshape(array.shape) % 3 if is_float(array) else np.ones(())
    return array + more.astype(array.dtype)


def _numbers(values: list[Value]) -> list[np.ndarray]:
    """List the arrays of values as float64, without random keys."""
    return [np.asarray(x.array, np.float64) for x in values if not is_key(x.array)]

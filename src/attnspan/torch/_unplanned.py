"""A warning for attention among one rank's rows alone, while a plan for these rows is on a mesh."""

import warnings
import weakref
from typing import Any, NamedTuple

from attnspan.call import LAYOUTS

__all__ = ["Held", "MissingPlanWarning", "plans", "remember", "warn_without_plan"]


class MissingPlanWarning(UserWarning):
    """Rows of one rank attend to each other without the plan that brings the keys of other ranks."""


class Held(NamedTuple):
    """Sizes of a rank's part of a problem: its rows and keys, padding included, and its heads."""

    rows: int
    keys: int
    heads: int
    kv_heads: int


#: What this rank holds of the problems of plans that are alive, by their identity.
plans: dict[int, Held] = {}
_warned: set[Held] = set()


def remember(plan: Any, held: Held) -> None:
    """Warn of calls of these sizes without a plan for as long as a plan lives."""
    plans[id(plan)] = held
    weakref.finalize(plan, plans.pop, id(plan), None).atexit = False


def warn_without_plan(q: Any, k: Any, mask: Any, layout: str) -> None:
    """Warn once if a call without a plan has exactly the rows, keys and heads that a plan has of this rank.

    Calls of any other size are local attention, or cross attention to keys that each rank has.
    """
    dims = LAYOUTS.get(layout)
    if dims is None or not len(dims) == q.ndim == k.ndim:
        return  # Refused later.
    length, heads = dims.index("tokens" if layout == "thd" else "length"), dims.index("heads")
    held = Held(q.shape[length], k.shape[length], q.shape[heads], k.shape[heads])
    if held in _warned or held not in list(plans.values()):
        return
    _warned.add(held)
    warnings.warn(
        f"attention without a plan: expected mask=plan.on(mesh, rows=rows), for q has the {held.rows} rows "
        f"and {held.heads} heads that this rank holds under a plan, got {mask!r}. These rows would see no "
        "key of another rank. Pass the plan; or, if they are other rows, whose number is the same by chance, "
        "ignore attnspan.torch.MissingPlanWarning by warnings.filterwarnings(...), or let go of the plan",
        MissingPlanWarning,
        stacklevel=3,
    )

"""A warning for attention among one rank's tokens only, while a plan for these tokens exists."""

import warnings
import weakref
from typing import Any, NamedTuple

from attnspan.call import LAYOUTS


class MissingPlanWarning(UserWarning):
    """Warning for a call among one rank's tokens without the plan that brings the keys of other ranks.

    Example:
        >>> import warnings
        >>> with warnings.catch_warnings():  # for example in a test: such a call then raises
        ...     warnings.simplefilter("error", MissingPlanWarning)
    """


class Held(NamedTuple):
    """Sizes of a rank's part of a problem: its queries and keys, including padding, and its heads."""

    rows: int
    keys: int
    heads: int
    kv_heads: int


#: Sizes of this rank's part for each plan that is alive, by the plan's id.
plans: dict[int, Held] = {}
_warned: set[Held] = set()


def remember(plan: Any, held: Held) -> None:
    """Warn about calls with these sizes and without a plan, as long as the plan is alive."""
    plans[id(plan)] = held
    weakref.finalize(plan, plans.pop, id(plan), None).atexit = False


def warn_without_plan(q: Any, k: Any, mask: Any, layout: str) -> None:
    """Warn once if a call without a plan has exactly the sizes of this rank's part of a plan.

    A call with any other size is local attention, or cross attention to keys that each rank has.
    """
    dims = LAYOUTS.get(layout)
    if dims is None or not len(dims) == q.ndim == k.ndim:
        return  # A later check raises.
    length, heads = dims.index("tokens" if layout == "thd" else "length"), dims.index("heads")
    held = Held(q.shape[length], k.shape[length], q.shape[heads], k.shape[heads])
    if held in _warned or held not in list(plans.values()):
        return
    _warned.add(held)
    warnings.warn(
        f"attention without a plan: expected mask=plan.on(mesh, rows=rows), because q has the {held.rows} "
        f"queries and {held.heads} heads that this rank holds under a plan, got {mask!r}. These queries "
        "would see no key of another rank. Pass the plan. If the sizes are equal by chance, ignore "
        "attnspan.torch.MissingPlanWarning with warnings.filterwarnings(...), or delete the plan",
        MissingPlanWarning,
        stacklevel=3,
    )

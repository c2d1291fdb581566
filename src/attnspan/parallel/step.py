"""Step from plain data to a framework: the functions that `on` and `gather` of layouts and plans call."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

__all__ = ["step"]

# (data, framework) -> module and function, which take the data, the mesh and options.
_STEPS = {
    ("plan", "torch"): ("torch.mesh_plan", "on_mesh"),
    ("local plan", "torch"): ("torch.mesh_plan", "MeshPlan.of"),
    ("rows", "torch"): ("torch.rows", "gather_rows"),
    ("plan", "jax"): ("jax.placed", "place"),
    ("layout", "jax"): ("jax.rows", "Placing.of"),
}


def step(what: str, framework: str) -> Callable[..., Any]:
    """Load the function that puts data on a mesh of a framework.

    Args:
        what: "layout", "plan", "local plan" or "rows".
        framework: "torch" or "jax".
    """
    module, name = _STEPS[what, framework]
    found: Any = import_module(f".{module}", __package__)
    for part in name.split("."):
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]

"""Attention over many ranks (context parallelism): layouts of tokens, and plans of what ranks exchange."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .errors import CommunicationError as CommunicationError
    from .errors import PlanMismatchError as PlanMismatchError
    from .layout import Layout as Layout
    from .local import LocalPlan as LocalPlan
    from .plan import Plan as Plan
    from .strategy import Strategy as Strategy
    from .torch.decode import ShardedCache as ShardedCache
    from .torch.mesh_plan import MeshPlan as MeshPlan

_HOMES = {
    "CommunicationError": "errors",
    "Layout": "layout",
    "LocalPlan": "local",
    "MeshPlan": "torch.mesh_plan",
    "Plan": "plan",
    "PlanMismatchError": "errors",
    "ShardedCache": "torch.decode",
    "Strategy": "strategy",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> object:
    # Layouts and plans serve any framework. Only names that need torch load it.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)

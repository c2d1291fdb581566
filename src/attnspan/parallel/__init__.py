"""Attention over many ranks (context parallelism): layouts of tokens, and plans of what ranks exchange."""

from typing import TYPE_CHECKING

from attnspan.base.lazy import lazy as _lazy

if TYPE_CHECKING:
    from .errors import CommunicationError as CommunicationError
    from .errors import PlanMismatchError as PlanMismatchError
    from .layout import Layout as Layout
    from .local import LocalPlan as LocalPlan
    from .plan import Plan as Plan
    from .rolling import roll as roll
    from .strategy import Strategy as Strategy
    from .torch.decode import ShardedCache as ShardedCache
    from .torch.mesh_plan import MeshPlan as MeshPlan
    from .torch.plan_stack import PlanStack as PlanStack

# Layouts and plans serve any framework. Only names that need torch load it.
_HOMES = {
    "CommunicationError": ".errors",
    "Layout": ".layout",
    "LocalPlan": ".local",
    "MeshPlan": ".torch.mesh_plan",
    "Plan": ".plan",
    "PlanMismatchError": ".errors",
    "PlanStack": ".torch.plan_stack",
    "ShardedCache": ".torch.decode",
    "Strategy": ".strategy",
    "roll": ".rolling",
}
__all__ = sorted(_HOMES)
__getattr__ = _lazy(__name__, _HOMES)

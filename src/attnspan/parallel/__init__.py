"""One attention over many ranks: who owns which rows, what crosses the network, and how it gets there."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .context import ContextParallel as ContextParallel
    from .errors import CommunicationError as CommunicationError
    from .errors import PlanMismatchError as PlanMismatchError
    from .machine import Machine as Machine
    from .partition import Partition as Partition
    from .strategy import Strategy as Strategy

_HOMES = {
    "ContextParallel": "context",
    "CommunicationError": "errors",
    "Machine": "machine",
    "Partition": "partition",
    "PlanMismatchError": "errors",
    "Strategy": "strategy",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> object:
    # Partitions and plans serve any framework: only what needs torch loads it.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)

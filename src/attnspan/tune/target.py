"""What a search needs of a back end: names, configurations, and calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from attnspan.bench.devices import Device, HostDevice
from attnspan.tune.cases import Case

__all__ = ["Bench", "Target"]


@dataclass(frozen=True)
class Bench:
    """A case that is set up to be called.

    Args:
        make_call: Gives the call of a configuration; see `attnspan.tune.search`.
        check: Given the result of a call: None, or how it differs from that of the first one.
        device: Where the calls run.

    Example:
        >>> bench = Bench(lambda config: lambda: config, lambda result: None)
        >>> bench.make_call({"block_q": 64})()
        {'block_q': 64}
    """

    make_call: Callable[[Mapping[str, int]], Callable[[], Any]]
    check: Callable[[Any], str | None]
    device: Device = field(default_factory=HostDevice)


class Target(Protocol):
    """A back end that can be tuned.

    Attributes:
        name: Of the back end.
        isa: Its instruction-set level or architecture.
        device: Name of the machine, which the cache belongs to.
        default: The configuration that leaves every choice to the kernel.
    """

    name: str
    isa: str
    device: str
    default: Mapping[str, int]

    def refuses(self, case: Case) -> str | None:
        """None, or why the back end cannot run the case."""

    def configs(self, case: Case) -> Sequence[Mapping[str, int]]:
        """The candidates for a case."""

    def open(self, case: Case) -> Bench:
        """Make the arrays of a case."""

"""One search after the other, each kept as soon as it is done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from attnspan.bench.timing import Meter
from attnspan.tune.cases import Case
from attnspan.tune.entry import Entry
from attnspan.tune.search import search
from attnspan.tune.target import Target

__all__ = ["Outcome", "tune"]


@dataclass
class Outcome:
    """What became of the cases.

    Args:
        entries: Of each finished search.
        refused: Cases that could not be run with the default configuration, and why.
        unreached: Cases that there was no time for.
        interrupted: Whether the user stopped it.

    Example:
        >>> Outcome().entries
        []
    """

    entries: list[Entry] = field(default_factory=list)
    refused: list[tuple[Case, str]] = field(default_factory=list)
    unreached: list[Case] = field(default_factory=list)
    interrupted: bool = False


def tune(
    target: Target,
    cases: Sequence[Case],
    *,
    seconds: float,
    budget: float,
    keep: Callable[[Entry], None],
    seed: int = 0,
    meter: Meter | None = None,
) -> Outcome:
    """Search the best configuration of each case, in their order.

    A keyboard interrupt ends it; what is found by then has been kept.

    Args:
        target: The back end.
        cases: What to tune.
        seconds: For each case, s.
        budget: For all of them, s.
        keep: Is given each entry as soon as it is found.
        seed: Of the order of candidates.
        meter: The clocks.

    Returns:
        What became of the cases.

    Example:
        >>> class Echo:
        ...     name, isa, device, default = "echo", "any", "a machine", {"block": 0}
        ...     def refuses(self, case):
        ...         return None
        ...     def configs(self, case):
        ...         return []
        ...     def open(self, case):
        ...         from attnspan.tune.target import Bench
        ...         return Bench(lambda config: lambda: None, lambda result: None)
        >>> cases = [Case("forward", "float32", 1, 8, 8, 16, "full")]
        >>> kept = []
        >>> _ = tune(Echo(), cases, seconds=0.1, budget=1, keep=kept.append)
        >>> str(kept[0].key), kept[0].reason
        ('echo forward any float32 D=16 S<=8 decode', 'no candidate')
    """
    meter = Meter() if meter is None else meter
    outcome, end = Outcome(), meter.clock() + budget
    waiting = list(cases)
    try:
        while waiting:
            left = end - meter.clock()
            if left <= 0:
                break
            case = waiting[0]
            entry = _search(target, case, outcome, min(seconds, left), seed, meter)
            if entry is not None:
                keep(entry)
                outcome.entries.append(entry)
            del waiting[0]
    except KeyboardInterrupt:
        outcome.interrupted = True
    outcome.unreached = waiting
    return outcome


def _search(
    target: Target, case: Case, outcome: Outcome, seconds: float, seed: int, meter: Meter
) -> Entry | None:
    reason = target.refuses(case)
    if reason is None:
        try:
            bench = target.open(case)
            bench.make_call(target.default)()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
    if reason is not None:
        outcome.refused.append((case, reason))
        return None
    found = search(
        bench.make_call,
        target.configs(case),
        target.default,
        seconds=seconds,
        check=bench.check,
        seed=seed,
        device=bench.device,
        meter=meter,
    )
    return Entry.of(case.key(target.name, target.isa), found, case.describe())

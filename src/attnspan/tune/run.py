"""One search after the other, each kept as soon as it is done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from attnspan.bench.timing import Meter
from attnspan.tune.cases import Case
from attnspan.tune.entry import Entry
from attnspan.tune.neighbours import Neighbours
from attnspan.tune.search import search
from attnspan.tune.target import Bench, Target

__all__ = ["BUSY", "MOST_NEIGHBOURS", "Outcome", "tune"]

#: How the reason begins where a find is not taken because of neighbours.
BUSY = "busy machine"

#: Processors that others may use during a search whose find is taken. Threads are the first victims of
#: neighbours: beside them fewer look faster than they are on a quiet machine.
MOST_NEIGHBOURS = 0.2


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
    watch: Callable[[], Neighbours] = Neighbours,
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
        watch: Begins to watch what other processes use.

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
            bench = _opened(target, case)
            if isinstance(bench, str):
                outcome.refused.append((case, bench))
            else:
                entry = _search(target, case, bench, min(seconds, left), seed, meter, watch())
                keep(entry)
                outcome.entries.append(entry)
            del waiting[0]
    except KeyboardInterrupt:
        outcome.interrupted = True
    outcome.unreached = waiting
    return outcome


def _opened(target: Target, case: Case) -> Bench | str:
    """The case ready to be called, or why it cannot be."""
    reason = target.refuses(case)
    if reason is not None:
        return reason
    try:
        bench = target.open(case)
        bench.make_call(target.default)()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return bench


def _search(
    target: Target, case: Case, bench: Bench, seconds: float, seed: int, meter: Meter, neighbours: Neighbours
) -> Entry:
    found = search(
        bench.make_call,
        target.configs(case),
        target.default,
        seconds=seconds,
        check=bench.check,
        device=bench.device,
        seed=seed,
        meter=meter,
    )
    others = neighbours.processors()
    if found.accepted and others is not None and others > MOST_NEIGHBOURS:
        reason = f"{BUSY}: other processes used {others:.1f} processors meanwhile"
        found = replace(found, best=target.default, accepted=False, reason=reason)
    problem = case.describe() | {"neighbours": None if others is None else round(others, 3)}
    return Entry.of(case.key(target.name, target.isa), found, problem)

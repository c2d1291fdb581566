"""Checks that may raise: the others go on, and the list of checks that were not made names the error."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from attnspan_lab.doctor.coverage import Coverage
from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.places import lines_of_error
from attnspan_lab.doctor.torch.recording.calls import CannotRun
from attnspan_lab.doctor.words import error_text

__all__ = ["guarded", "is_of_freed_graph", "why_not_made"]


def guarded(topic: str, check: Iterable[Finding], coverage: Coverage) -> Iterator[Finding]:
    """Yield the findings of a check. If the check raises, note that it was not made.

    Args:
        topic: Name of the check.
        check: Its findings, which a generator makes one after the other.
        coverage: Collects the checks.
    """
    try:
        yield from check
    except CannotRun as error:
        coverage.missed(topic, str(error))
    except Exception as error:
        coverage.missed(topic, why_not_made(error))


def is_of_freed_graph(error: BaseException) -> bool:
    """Whether a backward pass of torch reached a graph that an earlier backward pass has freed."""
    return isinstance(error, RuntimeError) and "backward through the graph a second time" in str(error)


def why_not_made(error: BaseException) -> str:
    """Write why a check was not made. Your step ran without this error before the check."""
    if is_of_freed_graph(error):
        return (
            "the doctor repeats the step, and the model keeps tensors of the graph of the step before, "
            "such as a cache. The backward pass of that step has freed the graph"
        )
    lines = lines_of_error(error)
    where = f", while it ran {lines[0]}" if lines else ""
    return f"the doctor's check raises {error_text(error)}{where}. Your own step does not raise"

"""Examination of a benchmark: it runs under watched clocks, then its timed statements run again."""

from __future__ import annotations

import io
import runpy
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, TextIO

from attnspan_lab.doctor.coverage import Coverage
from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.places import lines_of_error
from attnspan_lab.doctor.timing.body import Body, CannotRepeatError, body_of
from attnspan_lab.doctor.timing.clocks import Region, Watch, overlap, watched
from attnspan_lab.doctor.timing.judge import Timed, judged
from attnspan_lab.doctor.timing.replay import Replay, replay
from attnspan_lab.doctor.words import error_text

_MOST = 8  # Regions that are measured again.
_MOST_SHAPES = 4  # Groups of samples with equal shapes that one place may have.


class _Tee(io.StringIO):
    """Collects text, and passes it on."""

    def __init__(self, out: TextIO) -> None:
        super().__init__()
        self.out = out

    def write(self, text: str) -> int:
        self.out.write(text)
        return super().write(text)


def examine_benchmark(
    path: str, arguments: Sequence[str] = (), *, seconds: float = 0.5, limit: float = 60.0
) -> tuple[list[Finding], dict[str, Any]]:
    """Run a benchmark, and say what is wrong with its times.

    Args:
        path: A script.
        arguments: Arguments of the script.
        seconds: Time to spend on each way of measuring a region again.
        limit: Longest time to spend on measuring again.

    Returns:
        The findings, and facts: the output of the script and its timed regions.
    """
    output, before = _Tee(sys.stdout), (sys.argv, list(sys.path))
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).resolve().parent))
    try:
        with watched() as watch, redirect_stdout(output):
            try:
                runpy.run_path(path, run_name="__main__")
            except SystemExit as end:
                if end.code not in (None, 0):
                    return [_ended(end, path)], {"output": output.getvalue()}
            except Exception as error:  # Also a script that does not exist.
                return [_ended(error, path)], {"output": output.getvalue()}
            watch.closed = True
            with redirect_stdout(io.StringIO()):
                return _judge(watch, output.getvalue(), path, seconds, limit)
    finally:
        sys.argv, sys.path = before[0], before[1]


def _judge(
    watch: Watch, output: str, path: str, seconds: float, limit: float
) -> tuple[list[Finding], dict[str, Any]]:
    findings, facts, queued, coverage = list[Finding](), list[dict[str, Any]](), False, Coverage()
    regions = _inner(watch)
    if len(regions) > _MOST:
        coverage.missed("timed regions", f"{_MOST} of {len(regions)} were measured again")
    for region in regions[:_MOST]:
        body, again, why_not, compiles_again = _again(
            region, watch, seconds, limit / min(len(regions), _MOST)
        )
        compiled = tuple(overlap(watch.compilations, *x.span) for x in region)
        timed = Timed(region, compiled, body, again, why_not, output, compiles_again, coverage, queued)
        found = list(judged(timed))
        queued = any(x.kind == "not-waited" for x in found)
        findings += found
        facts.append(timed.facts)
    if not regions:
        findings = [Finding("no-timing", f"{path} takes no difference of two readings of a clock")]
    return findings, {"output": output, "regions": facts, "unchecked": coverage.facts["unchecked"]}


def _ended(error: BaseException, path: str) -> Finding:
    places = lines_of_error(error)
    what = f"{path} does not run: {error_text(error, 300)}"
    remedy = f"Make sure that python {path} runs"
    return Finding("subject", what, tuple(places[:3]), (), "The script raises", remedy)


def _inner(watch: Watch) -> list[Region]:
    """List the regions that contain no other region."""
    regions = _by_shapes(watch)

    def contains(one: Region, other: Region) -> bool:
        begin, end = one[-1].span
        spans = [x.span for x in other]
        return one is not other and any(begin <= first and last <= end for first, last in spans)

    return [x for x in regions if not any(contains(x, y) for y in regions)]


def _by_shapes(watch: Watch) -> list[Region]:
    """List the regions. If a place has arrays of many shapes, such as a growing cache, it is one region."""
    places: dict[Any, list[Region]] = {}
    for (start, stop, _), region in watch.regions.items():
        places.setdefault((start, stop), []).append(region)
    found = []
    for same in places.values():
        if len(same) > _MOST_SHAPES:
            same = [[x for one in same for x in one]]
        found += same
    return found


def _again(
    region: Region, watch: Watch, seconds: float, limit: float
) -> tuple[Body | None, Replay | None, str, float]:
    """Measure a region again.

    Returns:
        The statements and their times, or None and a reason, and the share of this time that is compilation.
    """
    body: Body | None = None
    again: Replay | None = None
    why_not, begin = "", time.perf_counter()
    try:
        body = body_of(region, watch)
        again = replay(body, seconds, limit)
    except CannotRepeatError as error:
        why_not = str(error)
    end = time.perf_counter()
    return body, again, why_not, overlap(watch.compilations, begin, end) / (end - begin)

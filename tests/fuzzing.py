"""`make fuzz`: every test that draws its cases, over and over with new seeds until the minutes are used.

A failing case is shrunk and printed as Python. Paste it into CORPUS of samples/random_calls.py, or as an
`@example` above its test: `make test` replays both.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


class Fuzz:
    """A plugin of pytest that repeats the tests it is left with.

    Args:
        minutes: How long.
        seed: Of the first round; the next has the next one.
    """

    def __init__(self, minutes: float, seed: int) -> None:
        self.minutes, self.seed, self.rounds = minutes, seed, 0
        self.cases: Counter[str] = Counter()
        self.seconds: Counter[str] = Counter()
        self.failed: dict[str, int] = {}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        import hypothesis  # pytest rewrites its plugin, which must not be loaded before

        self.set_seed = hypothesis.seed
        items[:] = [item for item in items if hypothesis.is_hypothesis_test(item.obj)]
        for item in items:
            inner = item.obj.hypothesis.inner_test
            if not hasattr(inner, "counts"):
                item.obj.hypothesis.inner_test = self._counted(inner)

    def _counted(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(inner)
        def counted(*args: Any, **keywords: Any) -> Any:
            self.cases[os.environ["PYTEST_CURRENT_TEST"].partition(" ")[0]] += 1
            return inner(*args, **keywords)

        counted.counts = True  # type: ignore[attr-defined]
        return counted

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        end = time.monotonic() + 60 * self.minutes
        for seed in itertools.count(self.seed):
            left = [item for item in session.items if item.nodeid not in self.failed]
            if not left:
                return True
            for item, following in zip(left, [*left[1:], None], strict=True):
                began = time.monotonic()
                if began > end:
                    session._setupstate.teardown_exact(None)
                    return True
                self.set_seed(seed)(item.obj)
                item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
                self.seconds[item.nodeid] += time.monotonic() - began
                if self.cases[item.nodeid] and item.nodeid in self.failed:
                    self.failed[item.nodeid] = seed
            self.rounds += 1
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed[report.nodeid] = self.seed + self.rounds

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        write = terminalreporter.write_line
        terminalreporter.section(f"cases, seeds {self.seed} to {self.seed + self.rounds}")
        for name, cases in self.cases.most_common():
            write(f"{cases:7,}  {60 * cases / max(self.seconds[name], 1e-9):7,.0f} a minute  {name}")
        whole = sum(self.cases.values())
        write(f"{whole:7,}  {whole / self.minutes:7,.0f} a minute  in all")
        for name, seed in self.failed.items():
            write(f"FAILED with seed {seed}: {name}; its shrunk case is above, and comes first the next time")


def _drawing() -> list[str]:
    """Files with tests that draw cases; ranks of processes last."""
    files = [str(x) for x in sorted(HERE.rglob("test_*.py")) if "@given(" in x.read_text()]
    return sorted(files, key=lambda x: x.endswith("test_parity.py"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("minutes", type=float)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6))
    given, more = parser.parse_known_args()
    os.environ["HYPOTHESIS_PROFILE"] = "fuzz"
    plugin = Fuzz(given.minutes, given.seed)
    files = [x for x in more if not x.startswith("-")] or _drawing()
    flags = ["-q", "--durations-min=1e9", "-p", "no:xdist", *(x for x in more if x.startswith("-"))]
    return int(pytest.main([*files, *flags], plugins=[plugin]))


if __name__ == "__main__":
    sys.exit(main())

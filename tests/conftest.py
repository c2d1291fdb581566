"""Settings that all tests share."""

import os
import shlex
import sys
from typing import Any

# Before the compiled module is loaded: what was tuned on this machine must not decide what is tested.
os.environ.setdefault("ATTNSPAN_TUNE_CACHE", "off")

import hypothesis
import pytest
from kernel_runner import Runner

from attnspan.kernels import cpu

# Examples are the same on every run, and a slow machine is no failure.
hypothesis.settings.register_profile("attnspan", derandomize=True, deadline=None, max_examples=60)
hypothesis.settings.register_profile("thorough", derandomize=False, deadline=None, max_examples=2000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "attnspan"))

# The kernel that the tests meet: the compiled module, or the program of tests/kernel_runner.py.
RUNNER = os.environ.get("ATTNSPAN_RUNNER", "")
if RUNNER:
    cpu._core = Runner(shlex.split(RUNNER))


def pytest_report_header() -> str:
    """Name the kernel that is tested, so that nobody mistakes one machine's result for another's."""
    machine = f" ({cpu._core.machine}): {RUNNER}" if isinstance(cpu._core, Runner) else " of this process"
    return f"kernel: level {cpu.isa()}{machine}" if cpu._core else "kernel: not compiled"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With a runner, skip what only the compiled module itself can show; each test gives its reason."""
    for item in items:
        mark = item.get_closest_marker("compiled_module")
        if RUNNER and mark is not None:
            item.add_marker(pytest.mark.skip(reason=f"without the compiled module: {mark.args[0]}"))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say what of the conformance suite ran on each backend, and what that declares unsupported."""
    suite = sys.modules.get("conformance_backends")
    if suite is None or not any(backend.ran for backend in suite.BACKENDS.values()):
        return
    terminalreporter.section("conformance")
    for name, backend in suite.BACKENDS.items():
        refused = [backend.missing] if backend.missing else []
        refused += [f"{option}: {reason}" for option, reason in backend.unsupported.items()]
        cells = f"{sum(backend.ran.values())} cells of {len(backend.ran)} options ran"
        terminalreporter.write_line(f"{name}: {cells}; unsupported: {'; '.join(refused) or 'nothing'}")

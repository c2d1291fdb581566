"""Settings that all tests share."""

import gc
import os
import re
import shlex
import sys
from collections.abc import Hashable, Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# Processes that tests start find the reference job too.
os.environ["PYTHONPATH"] = os.pathsep.join(
    (str(Path(__file__).parents[1] / "examples"), os.environ.get("PYTHONPATH", ""))
)
# Before torch imports Triton, which reads it once: there is no GPU, so its kernels are interpreted.
os.environ.setdefault("TRITON_INTERPRET", "1")

import few_collections  # noqa: F401
import hypothesis
import pytest
from _pytest.doctest import DoctestItem
from covering import SWITCH, covering, everything
from kernel_runner import Runner

from attnspan.kernels import cpu

# In the ordinary run examples are the same every time; a slow machine is no failure.
hypothesis.settings.register_profile("short", derandomize=True, deadline=None, max_examples=20)
hypothesis.settings.register_profile("long", derandomize=False, deadline=None, max_examples=500)
# `make fuzz` draws so many before it is the next test's turn.
hypothesis.settings.register_profile("fuzz", derandomize=False, deadline=None, max_examples=20)

# A conftest is no module of its own, whose name others could take; --doctest-modules would read it as one.
# sitecustomize is for processes that have the module that it loads.
collect_ignore_glob = ["*conftest.py", "*sitecustomize.py"]

# A program of XLA runs once or twice in a test: optimising it would take most of the time.
QUICKLY = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
# XLA ends a process that gives it a flag it does not know.
if find_spec("jaxlib") and version("jaxlib").startswith("0.10."):
    QUICKLY += " --xla_cpu_use_fusion_emitters=false"

# The kernel that the tests meet: the compiled module, or the program of tests/kernel_runner.py.
RUNNER = os.environ.get("ATTNSPAN_RUNNER", "")
if RUNNER:
    cpu.core = Runner(shlex.split(RUNNER))


def pytest_addoption(parser: pytest.Parser) -> None:
    for name, what in (
        ("--all", "whole products instead of covering arrays; long tests too"),
        ("--fast", "no slow tests, and each value of a factor once instead of pairs"),
        ("--zoo", "also what needs the packages of `make zoo`"),
    ):
        parser.addoption(name, action="store_true", help=what)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave to `make zoo` the tests whose packages `make setup` does not install."""
    mine = collection_path == config.rootpath / "tests/zoo" and not config.getoption("--zoo")
    return True if mine else None


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Choose the run before a test is imported, as modules multiply their cells themselves too."""
    if config.getoption("--all") and config.getoption("--fast"):
        raise pytest.UsageError("--all runs more than the ordinary run and --fast less: pass one of them")
    if config.getoption("--all"):
        os.environ[SWITCH] = "1"
    if not everything():
        os.environ.setdefault("XLA_FLAGS", QUICKLY)
    hypothesis.settings.load_profile(
        os.environ.get("HYPOTHESIS_PROFILE", "long" if everything() else "short")
    )


def pytest_unconfigure() -> None:
    """Unfreeze at exit, or nanobind reports the frozen objects as leaks."""
    gc.unfreeze()


@pytest.fixture(autouse=True, scope="module")
def _settled() -> None:
    """Leave what is there out of collections of garbage, which would walk through it again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _strict_ranks(request: pytest.FixtureRequest) -> Iterator[None]:
    """JAX refuses to broadcast shapes of different ranks, which careful users let it do."""
    jax = sys.modules.get("jax")
    if jax is None or request.node.get_closest_marker("below_promotion"):
        yield
        return
    with jax.numpy_rank_promotion("raise"):
        yield


def pytest_report_header() -> str:
    """Name the kernel that is tested, so that nobody mistakes one machine's result for another's."""
    machine = f" ({cpu.core.machine}): {RUNNER}" if isinstance(cpu.core, Runner) else " of this process"
    return f"kernel: level {cpu.isa()}{machine}" if cpu.core else "kernel: not compiled"


def _rows(items: list[pytest.Item]) -> list[tuple[Hashable, ...]]:
    """The factors of a test's cells: one for each mark that parametrizes it, one for each such fixture."""
    rows = []
    for item in items:
        given = [mark.args[0] for mark in item.iter_markers("parametrize")]
        names = [[x.strip() for x in mark.split(",")] if isinstance(mark, str) else mark for mark in given]
        params = item.callspec.params  # type: ignore[attr-defined]
        rest = [[name] for name in params if not any(name in each for each in names)]
        # Cells share the objects that marks list.
        rows.append(tuple(tuple(id(params[name]) for name in each) for each in names + rest))
    return rows


def _left_out(items: list[pytest.Item], fast: bool) -> set[pytest.Item]:
    """What only longer runs have: long tests, and cells of a product that its covering array leaves out."""
    marks = ("long", "slow") if fast else ("long",)
    left_out = {x for x in items if any(map(x.get_closest_marker, marks))}
    # Users never read the examples of private modules.
    left_out |= {x for x in items if isinstance(x, DoctestItem) and re.match(r"_(?!_init__)", x.path.name)}
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if hasattr(item, "callspec") and item not in left_out:
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for own in tests.values():
        mark = own[0].get_closest_marker("covering")
        taken = covering(_rows(own), 1 if fast else mark.args[0] if mark else 2)
        left_out |= set(own) - {own[i] for i in taken}
    return left_out


#: Rooms whose tests share what takes seconds to make: ranks, devices, compiled programs. They come first.
SHARED = ("tests/conformance", "tests/parallel", "tests/train")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep on one worker what shares processes, programs or an oracle's answers: a room, or a file.

    `--dist loadgroup` groups nothing where pytest is newer than what pytest-xdist 3.8 knows.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Rooms(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            room = file.rpartition("/")[0]
            return room if room in SHARED else file

    return Rooms(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave to the long run what is its own. With a runner, skip what only the compiled module can show."""
    # Who names a cell wants that one.
    if not everything() and not any("[" in argument for argument in config.args):
        left_out = _left_out(items, config.getoption("--fast"))
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]
    items.sort(key=lambda item: not item.nodeid.startswith(SHARED))
    for item in items:
        mark = item.get_closest_marker("compiled_module")
        if RUNNER and mark is not None:
            item.add_marker(pytest.mark.skip(reason=f"without the compiled module: {mark.args[0]}"))

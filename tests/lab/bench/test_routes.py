"""benchmarks/routes.py: phases come from clocks, reasons are said, routes compute the same."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fake_devices import VirtualDevice, World

from attnspan_lab.bench.timing import Budget, Meter

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import _routes_ways as ways  # noqa: E402
import routes  # noqa: E402
from _routes import TINY, Opened, Problem, Route, take  # noqa: E402

QUICK = Budget(seconds=0.02, sample_seconds=1e-5)
SMALL = Problem(32)


class Timed:
    """A route on a virtual clock: traced and compiled at the first call; its work goes on by itself."""

    def __init__(self, world, trace=0.0, compiling=0.0, work=1.0, round_trip=0.0, result=1.0):
        self._world, self._trace, self._compiling = world, trace, compiling
        self._device, self._compiled, self._result = VirtualDevice(world, work, round_trip), 0.0, result

    def __call__(self, _problem):
        is_new = [True]

        def call():
            if is_new:
                is_new.pop()
                self._world.now += self._trace + self._compiling
                self._compiled += self._compiling
            return self._device.submit()

        arrays = [np.full(2, self._result)]
        return Opened(call, self._device, lambda _: arrays, lambda: self._compiled)


def _take(world, found):
    return take(found, SMALL, SMALL, 0.1, replace(QUICK, calls=4), world.meter())


def test_phases_and_both_ways_of_waiting_are_told_apart():
    world = World()
    traced = Timed(world, trace=30.0, compiling=50.0, work=1.0, round_trip=0.5)
    base, route = _take(world, {"plain": Timed(world), "traced": traced})
    assert route.cold == (81.5, *(9 * [1.5]))
    assert (route.compile, route.trace) == (50.0, pytest.approx(30.0))
    assert route.hasty == pytest.approx(9.5)
    assert route.execute.median == pytest.approx(1.5)
    assert route.pipelined.median == pytest.approx(1.125)  # One wait for four calls.
    assert route.seconds == route.pipelined.median
    assert route.ratio.median == pytest.approx(1.125)
    assert base.ratio is None


def test_a_wrong_or_failing_or_absent_route_has_a_reason_and_no_times():
    def absent(_problem):
        raise ways.AbsentError("too large")

    world = World()
    wrong = {"wrong": Timed(world, result=2.0), "no number": Timed(world, result=float("nan"))}
    found = _take(world, {"good": Timed(world), **wrong, "broken": lambda _: 1 / 0, "absent": absent})
    assert [x.execute is not None for x in found] == [True, False, False, False, False]
    assert [x.reason for x in found[1:]] == [
        "its result differs from the first route's result by 1 of the norm",
        "its result differs from the first route's result by nan of the norm",
        "it failed: ZeroDivisionError: division by zero",
        "too large",
    ]


def _measured(names, problem):
    chosen = {name: ways.ROUTES[name] for name in names}
    return take(chosen, problem, replace(problem, length=TINY), 1e-3, QUICK, Meter())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # of torch itself
@pytest.mark.compiled_module("the kernel is called by itself")
def test_routes_of_torch_compute_the_same_and_compile_apart():
    names = ["torch-eager", "torch-compile", "torch-sdpa", "kernel", "kernel-128x128"]
    eager, compiled, *others = _measured(names, SMALL)
    assert [x.reason for x in (eager, compiled, *others)] == [None] * 5
    assert all(x.error < 1e-5 for x in (compiled, *others))
    assert eager.compile is eager.trace is None
    assert compiled.compile > 0
    assert compiled.cold[0] > compiled.compile + compiled.trace
    (refused,) = _measured(["kernel"], replace(SMALL, backward=True))
    assert "forward" in refused.reason


@pytest.mark.slow
def test_routes_of_jax_compute_the_same():
    pytest.importorskip("jax")
    for route in _measured(["torch-eager", "jax-jit", "call-jax", "jax-nn"], replace(SMALL, backward=True))[
        1:
    ]:
        assert route.reason is None, route
        assert route.error < 1e-5
        assert 0 < route.compile < route.cold[0]
        assert (route.pipelined is None) == (route.name == "call-jax")


@pytest.fixture
def other_python(tmp_path):
    """Makes an interpreter of another environment: a script that answers as the worker would."""

    def make(body):
        path = tmp_path / "python"
        path.write_text(f"#!{sys.executable}\nimport json, os, sys\n{body}\n")
        path.chmod(0o755)
        return path

    return make


def test_the_other_environment_is_asked(other_python):
    body = """
task = json.loads(sys.stdin.read())
assert sys.argv[1].endswith("routes.py") and sys.argv[2:] == ["--worker"]
assert task["problem"]["length"] == 32 and task["budget"]["seconds"] == 0.02, task
assert os.environ["NPROC"] == "2" and os.environ["PJRT_DEVICE"] == "CPU"
times = {"samples": [0.1], "calls": 1}
ratio = {"median": 1.5, "low": 1.0, "high": 2.0, "pairs": 5}
print("a line of the framework's own")
print(json.dumps([
    {"name": "jax-beside-xla", "execute": times},
    {"name": "torch-xla", "execute": times, "ratio": ratio, "partner": "jax-beside-xla"},
]))"""
    partner, lazy = routes.lazy_routes(SMALL, QUICK, other_python(body), threads=2)
    assert partner.partner == ""
    assert (lazy.partner, lazy.ratio.median) == ("jax-beside-xla", 1.5)


def test_what_goes_wrong_in_the_other_environment_is_the_reason(other_python):
    (route,) = routes.lazy_routes(SMALL, QUICK, other_python("sys.exit('ImportError: no torch_xla')"), 2)
    assert route.reason == "its process failed: ImportError: no torch_xla"
    python = other_python("import time; time.sleep(30)")
    (route,) = routes.lazy_routes(SMALL, QUICK, python, 2, timeout=0.5)
    assert route.reason == "its process did not end within 0 s"
    (route,) = routes.lazy_routes(SMALL, QUICK, Path("/nowhere/python"), 2)
    assert "make test-xla" in route.reason


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["0"], "length: expected 1 or more, got 0"),
        (["--seconds", "0"], "budget: expected positive finite limits"),
        (["--json", "/nowhere/routes.json"], "--json: expected a file in a folder that exists"),
        (["--dtype", "int8"], "invalid choice: 'int8'"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_measured(arguments, said, capsys):
    with pytest.raises(SystemExit):
        routes.main(arguments)
    assert said in capsys.readouterr().err


def test_the_worker_needs_no_framework_before_it_works():
    path = f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r})"
    code = f"{path}; import routes; print({{*sys.modules}} & {{'torch', 'jax'}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_the_command_measures_prints_and_writes(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(routes, "ROUTES", {name: ways.ROUTES[name] for name in ("torch-sdpa", "kernel")})
    monkeypatch.setenv("COLUMNS", "80")
    file = tmp_path / "routes.json"
    arguments = ["32", "--seconds", "0.02", "--json", str(file), "--xla-python", "/nowhere/python"]
    found = routes.main(arguments)
    said = capsys.readouterr().out
    assert said.startswith("(1, 5, 32, 128) float32, forward, on cpu")
    for words in ("warm calls", "naive loop: 10 cold calls", "not torch-xla: no environment"):
        assert words in said
    assert max(map(len, said.splitlines())) <= 80 or "not torch-xla" in said
    stored = json.loads(file.read_text())
    assert stored["problem"]["length"] == 32
    assert (
        [x["name"] for x in stored["routes"]]
        == [x.name for x in found]
        == ["torch-sdpa", "kernel", "torch-xla"]
    )
    assert Route(name="torch-xla", reason=found[-1].reason) == found[-1]

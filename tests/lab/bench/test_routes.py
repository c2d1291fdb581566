"""benchmarks/routes.py: phases come from clocks, reasons are said, routes compute the same."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fake_devices import VirtualDevice, World

from attnspan_lab.bench.timing import Budget

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import routes
from _routes import Opened, Problem, Route, take
from _routes_ways import ROUTES, AbsentError

SMALL, BUDGET = Problem(32), Budget(seconds=0.02, sample_seconds=1e-5, calls=4)


def _timed(world, trace=0.0, compiling=0.0, work=1.0, round_trip=0.0, result=1.0):
    """A route on a virtual clock: traced and compiled at the first call; its work goes on by itself."""
    device, compiled = VirtualDevice(world, work, round_trip), []

    def opened(_problem):
        is_new = [True]

        def call():
            if is_new:
                is_new.pop()
                world.now += trace + compiling
                compiled.append(compiling)
            return device.submit()

        return Opened(call, device, lambda _: [np.full(2, result)], lambda: sum(compiled))

    return opened


def test_phases_and_both_ways_of_waiting_are_told_apart():
    world = World()
    traced = _timed(world, trace=30.0, compiling=50.0, work=1.0, round_trip=0.5)
    ways = {"plain": _timed(world), "traced": traced}
    base, route = take(ways, SMALL, SMALL, 0.1, BUDGET, world.meter())
    assert route.cold == (81.5, *(9 * [1.5]))
    assert (route.compile, route.trace, route.hasty) == (50.0, pytest.approx(30.0), pytest.approx(9.5))
    assert route.execute.median == pytest.approx(1.5)
    assert route.seconds == route.pipelined.median == pytest.approx(1.125)  # One wait for four calls.
    assert (base.ratio, route.ratio.median) == (None, pytest.approx(1.125))


def test_a_wrong_or_failing_or_absent_route_has_a_reason_and_no_times():
    def absent(_problem):
        raise AbsentError("too large")

    world = World()
    ways = {"good": _timed(world), "wrong": _timed(world, result=2.0)}
    ways |= {"no number": _timed(world, result=float("nan")), "broken": lambda _: 1 / 0, "absent": absent}
    found = take(ways, SMALL, SMALL, 0.1, BUDGET, world.meter())
    assert [x.execute is not None for x in found] == [True, False, False, False, False]
    assert [x.reason for x in found[1:]] == [
        "its result differs from the first route's result by 1 of the norm",
        "its result differs from the first route's result by nan of the norm",
        "it failed: ZeroDivisionError: division by zero",
        "too large",
    ]


@pytest.fixture
def other_python(tmp_path):
    """Makes an interpreter of another environment: a script that answers as the worker would."""

    def make(body):
        path = tmp_path / "python"
        path.write_text(f"#!{sys.executable}\nimport json, os, sys\n{body}\n")
        path.chmod(0o755)
        return path

    return make


ANSWER = """
task = json.loads(sys.stdin.read())
assert sys.argv[1].endswith("routes.py") and sys.argv[2:] == ["--worker"]
assert task["problem"]["length"] == 32 and task["budget"]["seconds"] == 0.02, task
assert os.environ["NPROC"] == "2" and os.environ["PJRT_DEVICE"] == "CPU"
ratio = {"median": 1.5, "low": 1.0, "high": 2.0, "pairs": 5}
print("a line of the framework's own")
print(json.dumps([{"name": "torch-xla", "ratio": ratio, "partner": "jax-beside-xla"}]))"""


@pytest.mark.slow
def test_the_other_environment_is_asked_and_what_goes_wrong_there_is_the_reason(other_python):
    (lazy,) = routes.lazy_routes(SMALL, BUDGET, other_python(ANSWER), threads=2)
    assert (lazy.partner, lazy.ratio.median) == ("jax-beside-xla", 1.5)
    for body, said in (
        ("sys.exit('ImportError: no torch_xla')", "its process failed: ImportError: no torch_xla"),
        ("import time; time.sleep(30)", "its process did not end within 0 s"),
    ):
        (route,) = routes.lazy_routes(SMALL, BUDGET, other_python(body), 2, timeout=0.5)
        assert route.reason == said


@pytest.mark.slow
def test_the_worker_loads_no_framework_before_it_knows_its_threads():
    code = "import routes, sys; print({*sys.modules} & {'torch', 'jax'})"
    command, folder = [sys.executable, "-c", code], Path(routes.__file__).parent
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # of torch itself
@pytest.mark.compiled_module("the kernel is called by itself")
def test_the_command_measures_prints_and_writes(monkeypatch, tmp_path, capsys):
    names = ["torch-eager", "torch-compile", "torch-sdpa", "kernel", "jax-jit", "call-jax", "jax-nn"]
    monkeypatch.setattr(routes, "ROUTES", {name: ROUTES[name] for name in names})
    monkeypatch.setenv("COLUMNS", "80")
    file = tmp_path / "routes.json"
    options = ["--seconds", "0.02", "--json", str(file), "--xla-python", "/nowhere/python"]
    found = {x.name: x for x in routes.main(["32", *options])}
    said = capsys.readouterr().out
    assert said.startswith("(1, 5, 32, 128) float32, forward, on cpu")
    for words in ("warm calls", "naive loop: 10 cold calls", "not torch-xla: no environment"):
        assert words in said
    assert all(len(line) <= 80 or "not torch-xla" in line for line in said.splitlines())
    stored = json.loads(file.read_text())
    assert stored["problem"]["length"] == 32
    assert [x["name"] for x in stored["routes"]] == list(found) == [*names, "torch-xla"]
    lazy = found.pop("torch-xla")
    assert Route(name="torch-xla", reason=lazy.reason) == lazy
    assert "make test-xla" in lazy.reason
    assert {x.name: x.reason for x in found.values() if x.reason} == {}
    assert all(x.error < 1e-5 for x in list(found.values())[1:])
    eager, compiled, jitted = (found[name] for name in ("torch-eager", "torch-compile", "jax-jit"))
    assert eager.compile is eager.trace is None
    assert compiled.cold[0] > compiled.compile + compiled.trace > compiled.trace
    assert 0 < jitted.compile < jitted.cold[0]
    assert [name for name in names[4:] if found[name].pipelined is None] == ["call-jax"]
    (refused,) = take({"kernel": ROUTES["kernel"]}, *[replace(SMALL, backward=True)] * 2, 1e-3, BUDGET, None)
    assert "forward" in refused.reason

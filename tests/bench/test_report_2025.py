"""Routes: phases come from clocks, reasons are said, the story follows the figures, one command does it."""

import json
import re
import subprocess
import sys
from dataclasses import replace

import pytest
from fake_devices import FakeProbe, VirtualDevice, World
from rich.console import Console

from attnspan.bench import command
from attnspan.bench.cells import Ceilings
from attnspan.bench.options import BenchOptions
from attnspan.bench.results import Results
from attnspan.bench.routes import report
from attnspan.bench.routes.findings import Route, RouteStudy
from attnspan.bench.routes.lazy import find_python, lazy_routes
from attnspan.bench.routes.report import ReportPlan, measure_report, report_workload
from attnspan.bench.routes.rounds import Settings, take_routes
from attnspan.bench.routes.story import tell
from attnspan.bench.routes.table import show_routes
from attnspan.bench.routes.torch_ways import FixedBlocks, Sdpa, TorchCompile, TorchEager
from attnspan.bench.routes.way import Opened
from attnspan.bench.samples import Ratio, Timing
from attnspan.bench.timing import Budget
from attnspan.errors import OptionError
from attnspan.report import write_page

QUICK = Budget(seconds=0.02, sample_seconds=1e-5)
WORK = report_workload(32)


@pytest.fixture(autouse=True)
def no_other_environment(monkeypatch):
    """A machine without PyTorch/XLA, whatever there is below the working directory."""
    monkeypatch.setattr(report, "find_python", lambda _=None: None)


class Timed:
    """A route on a virtual clock: traced and compiled at the first call; its work goes on by itself."""

    def __init__(self, name, world, trace=0.0, compiling=0.0, work=1.0, round_trip=0.0):
        self.name = self.what = name
        self._world, self._trace, self._compiling = world, trace, compiling
        self._device = VirtualDevice(world, work, round_trip)
        self._compiled = 0.0

    def refuses(self, job):
        return "too large" if job == "large" else None

    def open(self, _job):
        is_new = [True]

        def call():
            if is_new.pop() if is_new else False:
                self._world.now += self._trace + self._compiling
                self._compiled += self._compiling
            return self._device.submit()

        return Opened(call, self._device, compiler=lambda: self._compiled)


def _same(_found):
    return 0.0, 1.0


def _take(world, *ways, job="job", compare=_same):
    return take_routes(ways, "tiny", job, compare, Settings(replace(QUICK, calls=4), world.meter(), 10))


def test_phases_and_both_ways_of_waiting_are_told_apart():
    world = World()
    plain = Timed("plain", world)
    traced = Timed("traced", world, trace=30.0, compiling=50.0, work=1.0, round_trip=0.5)
    base, route = _take(world, plain, traced)
    assert route.cold == (81.5, *(9 * [1.5]))
    assert route.compile_seconds == 50.0
    assert route.trace_seconds == pytest.approx(30.0)
    assert route.naive == pytest.approx(9.5)
    assert route.execute.median == pytest.approx(1.5)
    assert route.pipelined.median == pytest.approx(1.125)  # One wait for four calls.
    assert route.waiting == pytest.approx(4 / 3)
    assert route.inflation == pytest.approx(9.5 / 1.125)
    assert route.shares == pytest.approx({"trace": 30 / 95, "compile": 50 / 95, "execute": 15 / 95})
    assert route.ratio.median == pytest.approx(1.125)
    assert base.ratio is None


def test_a_wrong_or_failing_or_refusing_route_has_a_reason_and_no_times():
    world = World()
    good, wrong = Timed("good", world), Timed("wrong", world)
    errors = iter((0.0, float("nan")))
    broken = Timed("broken", world)
    broken.open = lambda _: 1 / 0
    found = _take(world, good, wrong, broken, compare=lambda _: (next(errors), 0.1))
    assert [route.ran for route in found] == [True, False, False]
    assert found[1].reason == "its result differs from the first route's by nan of the norm, over 0.1"
    assert found[2].reason == "it failed: ZeroDivisionError: division by zero"
    assert found[1].seconds is found[1].naive is found[1].trace_seconds is None
    (refused,) = _take(world, Timed("refusing", world), job="large")
    assert refused.reason == "too large"


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # of torch itself
def test_torch_routes_compute_the_same_and_compile_apart():
    ways = [TorchEager(), TorchCompile(), Sdpa(), FixedBlocks(0, 0), FixedBlocks(128, 128)]
    plan = ReportPlan(lengths=(32,), budget=QUICK)
    (study,) = measure_report(plan, ways=ways)
    eager, compiled, *others, lazy = study.routes
    if eager.ran:  # The compiled module may be absent; then the reason says so.
        assert [route.reason for route in others] == [None] * len(others)
        assert re.search(r"blocks of \d+ x 128", others[-1].note)
        assert compiled.reason is None, compiled.reason
        assert eager.compile_seconds is eager.trace_seconds is None
        assert compiled.compile_seconds > 0
        assert compiled.cold[0] > compiled.compile_seconds + compiled.trace_seconds
        assert all(route.error < 1e-5 for route in (compiled, *others))
        assert study.flops == 4 * 5 * 32 * 32 * 128
    assert lazy.reason.startswith("torch_xla is not installed here")


@pytest.mark.parametrize("mode", ["forward", "forward+backward"])
def test_jax_routes_compute_the_same(mode):
    pytest.importorskip("jax")
    from attnspan.bench.routes.jax_ways import CallJax, JaxJit, JaxNn

    ways = [TorchEager(), JaxJit(), CallJax(), JaxNn()]
    (study,) = measure_report(ReportPlan(lengths=(32,), modes=(mode,), budget=QUICK), ways=ways)
    for route in study.routes[1:4]:
        assert route.reason is None, route
        assert route.error < 1e-5
        assert 0 < route.compile_seconds < route.cold[0]
    assert study.route("jax-jit").pipelined is not None
    assert study.route("call-jax").pipelined is None


def _study(*routes):
    return RouteStudy(WORK, "forward", 2e9, routes)


def _route(name, seconds, pipelined=None, cold=(), compiling=None, **more):
    return Route(
        name,
        f"the route, {name}",
        cold=cold or (seconds,) * 10,
        compile_seconds=compiling,
        execute=Timing((seconds,)),
        pipelined=None if pipelined is None else Timing((pipelined,)),
        **more,
    )


STUDY = _study(
    _route("torch-eager", 0.0026, overhead=Timing((2e-5,))),
    _route(
        "jax-jit", 0.003, 0.0025, cold=(0.0955, *(9 * [0.003])), compiling=0.05, ratio=Ratio(0.96, 0.9, 1, 5)
    ),
    _route("kernel", 0.0025),
    _route("kernel-128x128", 0.005),
    Route("torch-xla", "lazy", reason="torch_xla is not installed"),
)


def test_the_story_says_how_large_each_cause_is():
    same, tracing, waiting, blocks, calling, lazy = tell(STUDY)
    assert "torch-eager 2.60 ms (1.00x), jax-jit 2.50 ms (0.96x)" in same
    assert "the slowest is 4% above the fastest." in same
    assert "a loop of 10 calls that counts the first reports jax-jit 12.3 ms instead of 2.50 ms" in tracing
    assert "(4.9x; trace 42.5 ms, compile 50.0 ms)" in tracing
    assert "jax-jit 3.00 ms a call instead of 2.50 ms (+20%)" in waiting
    assert "there is nothing to wait for" in waiting
    assert "128x128 takes 5.00 ms (2.00x)" in blocks
    assert "torch-eager 20.0 us (0.8% of a call here)" in calling
    assert lazy == "Lazy PyTorch/XLA was not measured: torch_xla is not installed."


def test_the_lazy_route_is_told_with_its_tracing_in_every_call():
    beside = _route("jax-beside-xla", 0.0025, 0.0025)
    more = {"retrace": Timing((0.0006,)), "ratio": Ratio(1.2, 1, 2, 5), "partner": "jax-beside-xla"}
    said = tell(_study(beside, _route("torch-xla", 0.003, 0.003, **more)))[-1]
    assert "not in the first alone: 600 us of Python each, 20% of a warm call" in said
    assert "it takes 3.00 ms, 1.20x the 2.50 ms of JAX beside it" in said


def test_what_is_traced_in_every_call_is_kept_without_the_cold_ones():
    world, seconds = World(), []

    class Retracing(Timed):
        def open(self, job):
            opened = super().open(job)

            def call():
                seconds.append(float(len(seconds)))
                return opened.call()

            seconds.clear()
            return replace(opened, call=call, retraces=seconds)

    (route,) = _take(world, Retracing("lazy", world))
    assert min(route.retrace.samples) >= 10
    assert len(route.retrace.samples) <= 100


def test_the_table_has_every_route_or_its_reason():
    console = Console(width=140, record=True)
    show_routes([STUDY], Ceilings({"fma_f32": 1e12}, 1e10), console)
    said = console.export_text()
    for words in ("report-2025", "jax-jit", "2.50 ms", "4.9x", "800.0", "80%", "not torch-xla: torch_xla is"):
        assert words in said, words


def test_figures_survive_the_file(tmp_path):
    path = tmp_path / "results.json"
    Results(routes=(STUDY,)).save(path)
    assert Results.load(path).routes == (STUDY,)


@pytest.fixture
def other_python(tmp_path):
    """Makes an interpreter of another environment: a script that answers as the worker would."""

    def make(body):
        path = tmp_path / "python"
        path.write_text(f"#!{sys.executable}\nimport json, os, sys\n{body}\n")
        path.chmod(0o755)
        return path

    return make


def _lazy(python, timeout=60.0):
    settings = Settings(QUICK, cold_calls=3)
    return lazy_routes(WORK, "forward", settings, threads=2, python=python, timeout=timeout)


def test_the_other_environment_is_asked_and_its_ratio_names_its_partner(other_python):
    body = """
task = json.loads(sys.stdin.read())
assert sys.argv[1:] == ["-m", "attnspan.bench.routes.lazy_worker"]
assert task["workload"]["q_len"] == 32 and task["cold_calls"] == 3, task
assert os.environ["NPROC"] == "2" and os.environ["PJRT_DEVICE"] == "CPU"
times = {"samples": [0.1], "calls": 1}
ratio = {"median": 1.5, "low": 1.0, "high": 2.0, "pairs": 5}
print("a line of the framework's own")
print(json.dumps([
    {"name": "jax-beside-xla", "what": "jax", "execute": times},
    {"name": "torch-xla", "what": "lazy", "execute": times, "ratio": ratio},
]))"""
    partner, lazy = _lazy(other_python(body))
    assert partner.partner == ""
    assert lazy.partner == "jax-beside-xla"
    assert lazy.ratio.median == 1.5


def test_what_goes_wrong_in_the_other_environment_is_the_reason(other_python):
    (route,) = _lazy(other_python("sys.exit('ImportError: no torch_xla')"))
    assert route.reason == "its process failed: ImportError: no torch_xla"
    (route,) = _lazy(other_python("import time; time.sleep(30)"), timeout=0.5)
    assert route.reason == "its process had not ended after 0 s"
    (route,) = _lazy(None)
    assert "make test-xla" in route.reason


def test_the_worker_needs_no_torch_before_it_works():
    code = (
        "import sys, attnspan.bench.routes.lazy_worker; print('torch' in sys.modules, 'jax' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_an_interpreter_that_is_no_file_is_refused(tmp_path):
    with pytest.raises(OptionError, match="no file"):
        find_python(tmp_path / "python")


def test_the_command_measures_prints_and_writes(monkeypatch, tmp_path):
    monkeypatch.setattr(command, "native_probe", FakeProbe)
    monkeypatch.setattr(report, "report_ways", lambda: (TorchEager(), Sdpa()))
    out, page = tmp_path / "results.json", tmp_path / "page.html"
    options = BenchOptions(workload="report-2025", lengths="32", seconds=0.02, json=out, html=page)
    written = []
    console = Console(width=140, record=True)
    results = command.run_bench(options, console, lambda found, path: written.append((found, path)))
    assert results.cells == ()
    assert json.loads(out.read_text())["routes"][0]["workload"]["q_len"] == 32
    assert written == [(results, page)]
    assert "report-2025 5x32 D128 float32" in console.export_text()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"full_size": True}, "--full-size: expected --workload report-2025"),
        (
            {"workload": "report-2025", "full_size": True, "lengths": "64"},
            "--full-size: expected no --lengths",
        ),
        ({"workload": "report-2025", "peers": "jax"}, "--peers: expected"),
        ({"workload": "report-2025", "head_dims": "64"}, "--head-dims: expected"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, words):
    with pytest.raises(OptionError, match=words):
        command.plan_of(BenchOptions(**options))


def test_the_full_size_is_the_reports_own():
    plan = command.report_of(BenchOptions(("report-2025",), full_size=True))
    ((workload, mode),) = plan.cells()
    assert (workload.sizes, workload.dtype, mode) == ("5x16384 D128", "float32", "forward")
    assert workload.note == "the report's own shape"


def test_the_page_has_every_route_its_reason_and_the_story(tmp_path):
    path = tmp_path / "page.html"
    write_page(Results(routes=(STUDY,)), path)
    page = path.read_text()
    for words in (
        "Routes: report-2025",
        "kernel-128x128",
        "torch_xla is not installed",
        "reports jax-jit 12.3 ms",
    ):
        assert words in page, words
    assert "a loop from cold, its first call counted" in page
    assert 'data-value="0.0122' in page


def test_a_page_of_routes_that_could_not_run_has_no_chart(tmp_path):
    path = tmp_path / "page.html"
    write_page(Results(routes=(_study(Route("torch-eager", "eager", reason="no kernel")),)), path)
    assert "No route ran here: torch-eager: no kernel." in path.read_text()

"""The command: what it prints, writes and refuses, and its exit codes."""

import json
import sys
from dataclasses import replace

import pytest
from attnspan.tools.bench.samples import Timing
from fake_devices import FakeProbe

from attnspan.cli import main
from attnspan.errors import OptionError
from attnspan.tools.bench import command
from attnspan.tools.bench.cells import Cell, Run, Workload
from attnspan.tools.bench.options import BenchOptions
from attnspan.tools.bench.results import Rate, Results, TrainingCell
from attnspan.tools.bench.workloads import save_workloads

WORK = Workload("tiny", "own", 1, 2, 2, 16, 16, 8, 8, "float32", "causal")


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs the command line; returns exit code, output and errors."""
    monkeypatch.setattr(command, "native_probe", FakeProbe)
    monkeypatch.setenv("COLUMNS", "160")

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["attnspan", "bench", *map(str, arguments)])
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code or 0
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


def test_a_small_run_prints_and_writes(run, tmp_path):
    own = tmp_path / "own.json"
    save_workloads(own, [WORK])
    out, page = tmp_path / "results.json", tmp_path / "page.html"
    options = ("--peers", "sdpa-flash,flex", "--seconds", 0.02, "--json", out, "--html", page)
    code, printed, _ = run("--workloads", own, "--modes", "forward+backward", *options)
    assert code == 0
    assert "tiny fp32" in printed
    assert "nowhere flex: it has no backward pass on CPU" in printed
    results = Results.load(out)
    assert [(cell.workload, cell.mode) for cell in results.cells] == [(WORK, "forward+backward")]
    assert [found.peer for found in results.cells[0].runs] == ["attnspan", "sdpa-flash", "flex"]
    assert results.complete
    assert "tiny" in page.read_text()


def test_the_list_names_workloads_and_peers(run):
    code, printed, _ = run("--list")
    assert code == 0
    for word in ("report-shape", "documents-corpus", "grid", "training", "sdpa-per-document", "tokamax"):
        assert word in printed
    assert run("grid-full-d64-*", "--list")[1].count("\n") == 7


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("desne",), "workloads: expected a name, a pattern, or one of the families"),
        (("--dtypes", "fp8"), "--dtypes: expected some of float32, bfloat16, float16, got 'fp8'"),
        (("--modes", "backward"), "--modes: expected some of forward, forward+backward"),
        (("--lengths", "1e3"), "--lengths: expected positive numbers with commas between, got '1e3'"),
        (("--peers", "spda"), "peers: expected some of attnspan, sdpa-flash"),
        (("--seconds", "0"), "budget: expected positive limits"),
        (("--threads", "0"), "threads: expected 1 or more, got 0"),
        (("--workloads", "nowhere.json"), "nowhere.json: expected a JSON list of workloads"),
        (("--summary", "nowhere.json"), "nowhere.json: expected a results file, got no such file"),
        (("small-16", "--device", "tpu"), "device: expected cpu or cuda"),
        (("small-16", "--device", "cuda"), "device: expected a CUDA device that torch can use, got none"),
    ],
)
def test_what_cannot_be_is_one_message(run, monkeypatch, arguments, message):
    # What slips through must not be measured for an hour.
    monkeypatch.setattr(command, "run_session", lambda *_, **__: pytest.fail("it was measured"))
    code, _, errors = run(*arguments)
    assert code == 2
    assert message in errors
    assert "Traceback" not in errors


def test_training_is_for_the_cpu(run, monkeypatch):
    monkeypatch.setattr(command, "device_named", lambda name: name)
    code, _, errors = run("training", "--device", "cuda")
    assert code == 2
    assert "training: expected --device cpu, got cuda" in errors


def _write(path, seconds):
    runs = (Run("attnspan", execute=Timing((seconds,) * 5)),)
    Results({"cpu": "c"}, cells=(Cell(WORK, "forward", 1, 1.0, 1.0, runs),)).save(path)
    return path


def test_a_regression_is_exit_code_one(run, tmp_path):
    old, new = _write(tmp_path / "old.json", 1.0), _write(tmp_path / "new.json", 1.2)
    assert run("--compare", old, new)[0] == 1
    assert run("--compare", new, old)[0] == 0
    assert run("--compare", old, old)[0] == 0


def test_files_of_other_versions_are_not_compared(run, tmp_path):
    old, new = _write(tmp_path / "old.json", 1.0), _write(tmp_path / "new.json", 1.0)
    data = json.loads(old.read_text())
    old.write_text(json.dumps(data | {"schema": 99}))
    code, _, errors = run("--compare", old, new)
    assert code == 2
    assert "expected results of schema 2, got schema 99" in errors


def test_the_summary_of_a_file(run, tmp_path):
    code, printed, _ = run("--summary", _write(tmp_path / "one.json", 1.0))
    assert code == 0
    assert "no cell of the grid was compared with sdpa-flash" in printed


def test_training_alone_plans_no_cells_and_full_plans_all():
    assert command.plan_of(BenchOptions(("training",))).total == 0
    assert command.plan_of(BenchOptions(("training", "dense-d64"))).total == 4
    default, full = command.plan_of(BenchOptions()), command.plan_of(BenchOptions(full=True))
    assert not any(work.family == "grid" for work in default.workloads)
    assert {work.dtype for work in default.workloads} == {"float32", "bfloat16"}
    assert len({work.name for work in full.workloads}) > len({work.name for work in default.workloads})
    assert {work.dtype for work in full.workloads} == {"float32", "bfloat16", "float16"}
    assert (default.memory, full.memory) == (False, True)
    assert not command.plan_of(BenchOptions(full=True, memory=False)).memory


def test_training_goes_into_the_same_file(run, tmp_path, monkeypatch):
    asked = []

    def measure_training(config, rounds, *, memory):
        asked.append((config.threads, rounds, memory))
        return (TrainingCell("attnspan", tokens_per_second=Rate((4321.0,))),)

    monkeypatch.setattr("attnspan.tools.bench.training.measure_training", measure_training)
    out = tmp_path / "results.json"
    code, printed, _ = run("training", "--threads", 1, "--rounds", 3, "--memory", "--json", out)
    assert code == 0
    assert asked == [(1, 3, True)]
    assert "4,321" in printed
    assert [cell.attention for cell in Results.load(out).training] == ["attnspan"]


def test_an_interrupt_still_writes_and_prints(run, tmp_path, monkeypatch):
    session = command.run_session

    def interrupted(plan, **options):
        return replace(session(plan, **options), complete=False)

    monkeypatch.setattr(command, "run_session", interrupted)
    out = tmp_path / "results.json"
    arguments = ("small-16", "training", "--dtypes", "float32", "--peers", "sdpa-flash", "--seconds", 0.02)
    code, printed, _ = run(*arguments, "--json", out)
    assert code == 0
    assert "stopped before the last cell" in printed
    assert not Results.load(out).complete
    assert Results.load(out).training == ()


def test_options_are_plain_text_until_they_are_used():
    assert "attnspan.tools.bench.peers" not in _loaded_by("import attnspan.tools.bench.options")
    with pytest.raises(OptionError, match="expected some of"):
        command.plan_of(BenchOptions(dtypes="float32,fp8"))


def _loaded_by(code):
    import subprocess

    done = subprocess.run(
        [sys.executable, "-c", f"import sys; {code}; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()

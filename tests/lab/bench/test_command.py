"""The command: what it prints at which width, what it writes and refuses, and its exit codes."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from fake_devices import FakeProbe
from rich.console import Console

from attnspan_lab.bench import command
from attnspan_lab.bench.cells import Ceilings, Cell, Run, Timing, Workload
from attnspan_lab.bench.compare import compare
from attnspan_lab.bench.options import BenchOptions
from attnspan_lab.bench.results import Results, TrainingCell
from attnspan_lab.bench.statistics import Interval, Samples
from attnspan_lab.bench.table import show_comparison, show_results, show_summary
from attnspan_lab.bench.workloads import grid
from attnspan_lab.files import write_json

WORK = Workload("tiny", "own", 1, 2, 2, 16, 16, 8, 8, "float32", "causal")
SIZES = (1, 32, 8, 32768, 32768, 128, 128)
LONG = Workload("documents-corpus-32k", "documents", *SIZES, "bfloat16", "causal & corpus(0)")
CEILINGS = Ceilings({"amx_bf16": 4e12, "dot_bf16": 1e12, "fma_f32": 5e11}, 1e10, {}, {"fma_f32": 0.03})
OURS = Run("attnspan", execute=Timing((1.0,)), utilisation=0.97, peak_memory=3 << 30, note="backend cpu")
SURE = Interval(130.0, 128.0, 133.0, pairs=25, level=0.957, p=1e-6)
OPEN = Interval(1.1, 0.9, 1.2, 9, 0.961, 0.5)
DENSE = Run("sdpa-dense-mask", execute=Timing((130.0,)), ratio=SURE, noisy=True, peak_memory=9 << 30)
JAX = Run("jax", execute=Timing((9.0,)), pipelined=Timing((3.0,)), ratio=OPEN)
FLEX = Run("flex", reason="it has no backward pass on CPU")
CELL = Cell(LONG, "forward+backward", 10**9, 4.5e11, 1e9, (OURS, DENSE, JAX, FLEX))
MACHINE = {"cpu": "a machine", "threads": 2, "isa": "amx", "samples": 25}
RESULTS = Results(MACHINE, CEILINGS, (CELL,))


@pytest.fixture
def run(attnspan, monkeypatch):
    """Runs a command at 80 columns: no line is longer. Returns code, output, errors."""
    monkeypatch.setattr(command, "native_probe", FakeProbe)

    def call(*arguments):
        code, out, errors = attnspan(*arguments)
        assert max(map(len, out.splitlines()), default=0) <= 80, out
        return code, out, errors

    return call


def _printed(show, *args, width):
    stream = io.StringIO()
    show(*args, Console(file=stream, width=width))
    text = stream.getvalue()
    assert max(map(len, text.splitlines())) <= width, text
    assert "…" not in text, "nothing is cut short"
    return " ".join(text.split())


def _lacks(text, *parts):
    return [part for part in parts if part not in text]


@pytest.mark.slow
def test_a_small_run_prints_and_writes(run, tmp_path):
    own, out, page = tmp_path / "own.json", tmp_path / "results.json.gz", tmp_path / "page.html"
    write_json(own, [WORK])
    options = ("--peers", "sdpa-flash,flex", "--seconds", 0.02, "--json", out, "--html", page)
    code, printed, _ = run("bench", "--workloads", own, "--modes", "forward+backward", *options)
    said = ("tiny fp32", "nowhere flex: it has no backward pass on CPU", "order statistics of ")
    assert (code, _lacks(printed, *said)) == (0, [])
    results = Results.load(out)
    assert [(cell.workload, cell.mode) for cell in results.cells] == [(WORK, "forward+backward")]
    assert [found.peer for found in results.cells[0].runs] == ["attnspan", "sdpa-flash", "flex"]
    assert results.complete
    assert "tiny fp32" in run("bench", "--show", out, "--html", tmp_path / "again.html")[1]
    assert (tmp_path / "again.html").read_text() == page.read_text()


CLEAN = replace(RESULTS, environment={"revision": "1234567890ab"})
FEW = replace(DENSE, ratio=replace(SURE, pairs=5))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"complete": False}, "the run stopped before its last cell"),
        ({"environment": {"revision": "abc with changes"}}, "had uncommitted changes (abc with changes)"),
        ({"cells": (replace(CELL, runs=(OURS, FEW, JAX)),)}, "1 of 2 ratios have fewer than 9 pairs"),
        ({"environment": {}, "complete": False}, "last cell, the code had uncommitted changes (None)"),
    ],
)
def test_a_file_is_cited_unless_there_are_reasons_against_it(run, tmp_path, changes, reason):
    replace(CLEAN, **changes).save(tmp_path / "results.json.gz")
    code, printed, errors = run("bench", "--cite", tmp_path / "results.json.gz")
    row = "| documents-corpus-32k, bfloat16, forward+backward | 130 ~ | ?1.10 |"
    assert (code, reason in errors, row in printed) == (2 if reason else 0, True, not reason)


def test_the_list_names_workloads_and_peers(run):
    names = ("report-shape", "documents-corpus-32k", "grid", "training", "sdpa-per-document", "tokamax")
    assert not _lacks(run("bench", "--list")[1], *names)
    assert run("bench", "grid-full-d64-*", "--list")[1].count("grid-full") == 7


@pytest.mark.parametrize(
    "arguments",
    [
        *("--help", "bench --help", "show --help", "tune --help", "doctor --help", "show --list"),
        *("show causal&window(40)", "show natten((8,8),(3,3))", "show causal --q-len 5000"),
    ],
)
def test_what_other_commands_print_fits_80_columns(run, arguments):
    assert run(*arguments.split())[0] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("desne", "workloads: expected a name, a pattern, or one of the families"),
        ("--dtypes fp8", "--dtypes: expected some of float32, bfloat16, float16, got 'fp8'"),
        ("--modes backward", "--modes: expected some of forward, forward+backward"),
        ("--lengths 1e3", "--lengths: expected positive numbers, separated by commas, got '1e3'"),
        ("--peers spda", "peers: expected some of attnspan, attnspan-vendor"),
        ("--seconds 0", "budget: expected positive finite limits"),
        ("--seconds inf", "budget: expected positive finite limits"),
        ("--width nan", "budget: expected positive finite limits"),
        ("--samples 8", "--samples: expected 9 or more, got 8"),
        ("training --rounds 8", "--rounds: expected 9 or more, got 8"),
        ("training --ranks 0", "--ranks: expected 1 or more, got 0"),
        ("small-16 --ranks 2", "--ranks: expected a run of training, got none"),
        ("--json /proc/nowhere/a.json", "/proc/nowhere/a.json: expected a writable file"),
        ("--html /", "/: expected a writable file, got a folder"),
        ("--show a.json --summary a.json", "expected one of --show or --summary, got several"),
        ("--threads 0", "threads: expected 1 or more, got 0"),
        ("--workloads nowhere.json", "nowhere.json: expected a JSON list of workloads"),
        ("--summary nowhere.json", "nowhere.json: expected a results file, got no such file"),
        ("small-16 --device tpu", "device: expected cpu or cuda"),
        ("small-16 --device cuda", "device: expected a CUDA device that torch can use, got none"),
        ("training --device cuda", "training: expected --device cpu, got cuda"),
    ],
)
def test_what_cannot_be_is_one_message(run, monkeypatch, arguments, message):
    # What slips through must not be measured for an hour.
    monkeypatch.setattr(command, "run_plan", lambda *_, **__: pytest.fail("it was measured"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    code, _, errors = run("bench", *arguments.split())
    assert (code, message in errors) == (2, True), errors


def test_two_files_are_compared_and_a_regression_is_exit_code_one(run, tmp_path):
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    for path, seconds in ((old, 1.0), (new, 1.2)):
        runs = (Run("attnspan", execute=Timing((seconds,) * 9)),)
        Results({"cpu": "c"}, cells=(Cell(WORK, "forward", 1, 1.0, 1.0, runs),)).save(path)
    assert [run("bench", "--compare", *x)[0] for x in ((old, new), (new, old), (old, old))] == [1, 0, 0]
    assert "no cell of the grid was compared with sdpa-flash" in run("bench", "--summary", new)[1]
    old.write_text(json.dumps(json.loads(old.read_text()) | {"schema": 99}))
    code, _, errors = run("bench", "--compare", old, new)
    assert (code, "expected results of schema 3, got schema 99" in errors) == (2, True)


def test_training_alone_plans_no_cells_and_full_plans_all():
    def plan(*names, **options):
        return command.plan_of(BenchOptions(names, **options))

    assert [plan(*names).total for names in (("training",), ("training", "dense-d64"))] == [0, 4]
    default, full = plan(), plan(full=True)
    assert not any(work.family == "grid" for work in default.workloads)
    assert {work.name for work in full.workloads} > {work.name for work in default.workloads}
    dtypes = [{work.dtype for work in each.workloads} for each in (default, full)]
    assert dtypes == [{"float32", "bfloat16"}, {"float32", "bfloat16", "float16"}]
    assert (default.memory, full.memory, plan(full=True, memory=False).memory) == (False, True, False)
    assert plan(cold=True).cold


def test_training_goes_into_the_same_file(run, tmp_path, monkeypatch):
    asked, out = [], tmp_path / "results.json"

    def measure_training(config, rounds, *, memory):
        asked.append((config.threads, rounds, memory))
        return (TrainingCell("attnspan", tokens_per_second=Samples((4321.0,))),)

    monkeypatch.setattr("attnspan_lab.bench.training.measure_training", measure_training)
    options = ("--threads", 1, "--rounds", 9, "--memory", "--seconds", 0.02, "--json", out)
    code, printed, _ = run("bench", "training", *options)
    assert (code, asked, "4,321" in printed) == (0, [(1, 9, True)], True)
    assert [cell.attention for cell in Results.load(out).training] == ["attnspan"]


def test_an_interrupt_still_writes_and_prints(run, tmp_path, monkeypatch):
    out = tmp_path / "results.json"
    monkeypatch.setattr(command, "run_plan", lambda *_, **__: replace(RESULTS, complete=False))
    code, printed, _ = run("bench", "small-16", "training", "--json", out)
    assert (code, "stopped before the last cell" in printed) == (130, True)
    assert (Results.load(out).complete, Results.load(out).training) == (False, ())
    # Before the first cell, an older file is worth more than an empty one.
    monkeypatch.setattr(command, "run_plan", lambda *_, **__: Results(complete=False))
    before = out.read_bytes()
    assert run("bench", "small-16", "--json", out)[0] == 130
    assert out.read_bytes() == before


@pytest.mark.parametrize("width", [80, 100, 200])
def test_a_table_fits_and_names_what_it_leaves_out(width):
    training = (
        TrainingCell("sdpa", tokens_per_second=Samples((12345.0,)), ratio=replace(SURE, pairs=9)),
        TrainingCell("sdpa-documents", ratio=OPEN),
    )
    text = _printed(show_results, replace(RESULTS, training=training, complete=False), width=width)
    assert not _lacks(
        text,
        "a machine, 2 threads, amx",
        "fma_f32 500 GFLOP/s (spread 3%), dot_bf16 1.00 TFLOP/s, amx_bf16 4.00 TFLOP/s",
        "documents, forward+backward",
        "documents-corpus-32k bf16",
        "130 128-133 ~",
        "1 of 2 ratios may be 1",
        "level 95.7 to 96.1 %",
        "1 of 2 ratios have fewer than 25 pairs",
        "nowhere flex: it has no backward pass on CPU",
        "too noisy for 1 of 1 cells",
        "for the time of the device itself",
        "12,345",
        "stopped before the last cell",
    )
    assert text.count("?1.10") == 2, "also of training"
    figures = {"memory": "3.00 GiB", "in a row": "!3.00 s", "peak": "11 %", "remark": "backend cpu"}
    left_out = text.partition("not shown at")[2].partition("nowhere")[0]
    for column, figure in figures.items():
        assert (figure in text) != (column in left_out), column


def test_what_is_bound_by_memory_shows_its_share_and_a_reason_is_said_once():
    def shown(*cells, width):
        return _printed(show_results, replace(RESULTS, cells=cells), width=width)

    decode = replace(CELL, flops=1e9, bytes=2.5e9, runs=(OURS, FLEX), cold=True)
    assert not _lacks(shown(decode, width=100), "25 %", "bf16 cold")
    assert " read " not in shown(CELL, width=200).partition("documents,")[2]
    other = replace(CELL, workload=replace(LONG, name="other"), mode="forward", runs=(OURS, JAX))
    text = shown(CELL, other, width=160)
    assert "not flex: it has no backward pass on CPU" in text
    assert "nowhere" not in text
    assert shown(CELL, CELL, width=160).count("it has no backward pass on CPU") == 1


def test_the_summary_is_the_table_of_targets():
    cells = []
    for work in grid():
        # Ratios 1, 2, 4, 8 at the lengths of the mean: their geometric mean is known.
        ratio = {1024: 1.0, 2048: 2.0, 4096: 4.0, 8192: 8.0}.get(work.k_len, 0.5)
        found = Interval(ratio, ratio * 0.9, ratio * 1.1, 25, p=1.0 if ratio == 1 else 1e-6)
        peer = Run("sdpa-flash", execute=Timing((2.0 * ratio,)), ratio=found)
        cells.append(Cell(work, "forward", 10, 1e12, 1e9, (replace(OURS, execute=Timing((2.0,))), peer)))
    results = Results({"cpu": "c"}, CEILINGS, tuple(cells))
    text = _printed(show_summary, results, width=100)
    # Mean and share of the peak, the lowest ratio, and the cells behind out of all.
    assert text.count("2.83") == 6
    assert not _lacks(text, "13 %", "0.50", "12/28")
    assert _printed(show_results, results, width=80).count("causal-d64-s2048") == 3
    show_summary(results, Console(file=(stream := io.StringIO()), width=30))
    assert "2.83" in stream.getvalue(), "a figure is never cut"


def test_a_comparison_names_the_cell_and_the_verdict():
    slow = replace(OURS, execute=Timing((1.5, 1.5, 1.5)))
    new = replace(RESULTS, environment={"cpu": "b"}, cells=(replace(CELL, runs=(slow,)),))
    text = _printed(show_comparison, compare(RESULTS, new), width=80)
    machine = "different machine or setting: cpu: a machine, then b"
    rest = ("Times are not compared, only ratios", "documents-corpus-32k", "1 cells compared: 0 regressions")
    assert not _lacks(text, machine, *rest)


def test_committed_results_print_at_80_columns(run):
    path = Path(__file__).parents[3] / "benchmarks" / "results" / "tiles-amx.json.gz"
    assert run("bench", "--show", path)[0] == run("bench", "--summary", path)[0] == 0

"""The zoo's runner: whatever is wrong with an attention is told, and costs the run nothing else."""

from __future__ import annotations

import dataclasses
import io
from itertools import product
from pathlib import Path

import pytest
from rich.console import Console
from zoo_samples import architectures as samples

from attnspan.errors import OptionError
from attnspan_lab.bench.cells import Timing
from attnspan_lab.bench.statistics import Interval
from attnspan_lab.zoo import run
from attnspan_lab.zoo.markdown import BEGIN, END, markdown_of
from attnspan_lab.zoo.measure import Keeper, results
from attnspan_lab.zoo.plan import Key, Settings, plan
from attnspan_lab.zoo.results import Cell, Generation, Row, Speed, ZooResults
from attnspan_lab.zoo.run import run_zoo
from attnspan_lab.zoo.speed import SpeedSettings, measure_speed
from attnspan_lab.zoo.table import line_of, show_zoo
from attnspan_lab.zoo.verdicts import FACTOR, FLOOR, complaints, is_exact, summary_of

QUICK = Settings(tokens=(45, 61), seconds=0)
SOURCES = {"samples": "zoo_samples"}
BY_NAME = {x.name: x for x in samples()}


def row_of(name, *keys, settings=QUICK):
    keeper = Keeper(BY_NAME[name], settings)
    return Row(name, "samples", "encoder", tuple(map(keeper.run, keys)))


def keys(mode, layout, shapes=1, names="identity eager sdpa attnspan"):
    return [Key(name, mode, layout, shapes) for name in names.split()]


# What is wrong, the layout where it shows, what is said of it.
WRONG = {
    "leaking": ("packed", ["results and gradients differ", "leaks: document 0 is seen by"]),
    "all_pairs": ("plain", ["creates a (tokens, tokens) tensor, (2, 2, 45, 45)"]),
    "wrong_gradients": ("plain", ["results and gradients differ"]),
    "wrong": ("padded", ["results and gradients differ"]),
    "no_backward": ("plain", ["no backward: NotImplementedError: no gradients here"]),
    "half_used": (
        "plain",
        ["torch's attention ran 2 times, attnspan's 2", "creates a (tokens, tokens) tensor"],
    ),
    "unused": ("plain", ["unused: attnspan's operator never ran"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said(name):
    layout, expected = WRONG[name]
    row = row_of(name, *keys("eager", layout))
    found = complaints(row)
    assert len(found) == len(expected), found
    for said, wanted in zip(found, expected, strict=True):
        assert said.startswith(f"eager {layout}: {wanted}")
    # Nothing is said of those that are sound.
    assert complaints(row, "sdpa") == complaints(row, "eager") == []
    assert line_of(row)[1] == f"{len(expected)} wrong"


@pytest.mark.slow
def test_a_sound_attention_is_not_blamed():
    row = row_of("sound", *(key for layout in ("plain", "packed", "padded") for key in keys("eager", layout)))
    assert complaints(row) == []
    assert [x.calls for x in row.cells if x.implementation == "attnspan"] == [2, 2, 2]
    totals = summary_of([row])
    assert (str(totals.runs["attnspan"]), str(totals.exact["attnspan"])) == ("3 of 3", "3 of 3")
    assert (str(totals.leaking["attnspan"]), str(totals.all_pairs["attnspan"])) == ("0 of 1", "0 of 1")
    assert str(totals.all_pairs["sdpa"]) == "1 of 1"


@pytest.mark.slow
def test_breaks_of_the_graph_and_more_graphs_than_others_are_said():
    row = row_of("breaking", *keys("compiled", "plain", names="identity attnspan"))
    (found,) = complaints(row)
    assert found.startswith("compiled plain: compile: Unsupported: Call to `torch._dynamo.graph_break()`")
    assert str(summary_of([row]).compiles["attnspan"]) == "0 of 1"
    three = dataclasses.replace(QUICK, tokens=(45, 131, 61))
    row = row_of("specialising", *keys("compiled", "plain", 3, "sdpa attnspan"), settings=three)
    assert complaints(row) == ["compiled plain: 3 graphs, SDPA 2"]
    sdpa, ours = row.cells
    assert (bool(sdpa.pairs), ours.pairs) == (True, ())  # SDPA's mask is seen in the graph
    as_many = dataclasses.replace(ours, graphs=sdpa.graphs)
    assert complaints(dataclasses.replace(row, cells=(sdpa, as_many))) == []


@pytest.mark.slow
def test_a_models_own_failures_are_not_attentions():
    keeper = Keeper(BY_NAME["own"], dataclasses.replace(QUICK, layouts=("plain",)))
    made = [work() for _, work in results(keeper, ())]
    row = Row("own", "samples", "encoder", tuple(made))
    compiled = [x for x in made if x.mode == "compiled"]
    assert [x.failed for x in compiled] == ["compile"] * 4
    assert complaints(row) == []
    assert line_of(row)[6:9] == ("own",) * 3
    assert str(summary_of([row]).compiles["attnspan"]) == "-"
    row = row_of("own_leak", *keys("eager", "packed"))
    assert [bool(x.leaks) for x in row.cells] == [True] * 4
    assert complaints(row) == []


def test_what_one_attention_can_do_is_not_beyond_the_model():
    where = ("compiled", "plain")
    identity, ours = Cell("identity", *where, "compile"), Cell("attnspan", *where, "compile", "no")
    assert complaints(Row("x", "samples", "encoder", (identity, ours))) == []
    row = Row("x", "samples", "encoder", (identity, Cell("sdpa", *where), ours))
    assert complaints(row) == ["compiled plain: compile: no"]
    assert str(summary_of([row]).compiles["attnspan"]) == "0 of 1"


@pytest.mark.slow
def test_the_identity_runs_where_another_attention_failed():
    settings = dataclasses.replace(QUICK, tokens=(45,), layouts=("plain", "packed"), modes=("compiled",))
    labels = [label for label, work in results(Keeper(BY_NAME["breaking"], settings), ()) if work()]
    assert labels[-1] == "identity compiled plain"  # the layout where only attnspan was to be compiled
    assert len(labels) == len(set(labels)) == len(plan(["plain", "packed"], settings)) + 1


def test_rounding_is_judged_by_the_eager_implementations_own():
    def exact(mine, theirs):
        eager = Cell("eager", "eager", "plain", output_error=theirs, gradient_error=theirs)
        ours = Cell("attnspan", "eager", "plain", output_error=theirs, gradient_error=mine)
        return is_exact(Row("x", "samples", "encoder", (eager, ours)), ours)

    assert exact(FACTOR * 1e-6, 1e-6)
    assert exact(FLOOR, 0.0)
    assert exact(FACTOR * 1e-5 + 2 * FLOOR, 1e-5) is False
    assert exact(float("nan"), 1e-6) is False


@pytest.fixture
def found_by_processes(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


@pytest.mark.slow
@pytest.mark.usefixtures("found_by_processes", "forked")
def test_a_crash_or_a_hang_costs_one_cell():
    chosen = [BY_NAME["crashing"], BY_NAME["hanging"]]
    settings = dataclasses.replace(QUICK, layouts=("packed", "padded"), modes=("eager",))
    found = run_zoo(chosen, settings, jobs=2, limit=12, sources=SOURCES)
    assert found.complete
    rows = {row.name: row for row in found.rows}
    assert complaints(rows["crashing"]) == ["eager padded: crash: the process ended with signal SIGABRT"]
    assert complaints(rows["hanging"]) == ["eager packed: time: not finished after 12 s"]
    for row in rows.values():
        assert len(row.cells) == 10
        assert sum(x.failed is None for x in row.cells) == 9


@pytest.mark.slow
@pytest.mark.usefixtures("found_by_processes", "forked")
def test_an_interrupt_loses_nothing_and_the_next_run_goes_on(tmp_path):
    chosen, path = [BY_NAME["sound"], BY_NAME["unused"]], tmp_path / "zoo.json"
    settings = dataclasses.replace(QUICK, layouts=("plain",), modes=("eager",))

    def stop(_):
        raise KeyboardInterrupt

    stopped = run_zoo(chosen, settings, path=path, sources=SOURCES, after=stop)
    assert not stopped.complete
    assert ZooResults.load(path) == stopped
    assert [row.name for row in stopped.rows] == ["sound"]
    whole = run_zoo(chosen, settings, start=stopped, path=path, sources=SOURCES)
    assert whole.complete
    assert whole.rows[0] == stopped.rows[0]
    assert [row.name for row in ZooResults.load(path).rows] == ["sound", "unused"]


@pytest.mark.usefixtures("found_by_processes")
def test_a_process_that_cannot_start_is_a_row(monkeypatch):
    monkeypatch.setattr(run, "_MODULE", "attnspan.no_such_module")
    found = run_zoo([BY_NAME["sound"]], QUICK, sources=SOURCES)
    (said,) = complaints(found.rows[0])
    assert "exit code 1" in said
    assert "no_such_module" in said


@pytest.mark.slow
@pytest.mark.usefixtures("found_by_processes", "forked")
def test_steps_are_timed_and_their_memory_is_measured(tmp_path):
    settings = SpeedSettings(backend="eager", tokens=64, memory_tokens=1024, rounds=9, seconds=0.2)
    path = tmp_path / "zoo.json"
    (found,) = measure_speed([BY_NAME["sound"]], settings, path=path, sources=SOURCES).speed
    assert not found.reasons
    assert found.layout == "packed"
    assert found.ratio is not None
    assert {name: len(x.samples) for name, x in found.seconds.items()} == {"attnspan": 9, "sdpa": 9}
    # SDPA's mask of all pairs alone is 8 MiB in float32.
    assert found.peaks["sdpa"] - found.peaks["attnspan"] > 4 << 20
    assert ZooResults.load(path).speed == (found,)
    broken = dataclasses.replace(BY_NAME["sound"], name="missing")
    (failed,) = measure_speed([broken], dataclasses.replace(settings, limit=0.01), sources=SOURCES).speed
    assert set(failed.reasons) == {"time", "memory of attnspan", "memory of sdpa"}


def test_steps_of_two_processors_do_not_share_a_file():
    there = dataclasses.replace(sample_results(), speed_environment={"cpu": "another <processor>"})
    assert "Training steps, measured on another <processor>, None." in markdown_of(there)
    wanted = r"steps timed on this processor, .* got steps of another processor"
    with pytest.raises(OptionError, match=wanted):
        measure_speed([], SpeedSettings(), start=there)
    assert measure_speed([], SpeedSettings(), start=ZooResults()).complete


def sample_results():
    """Something of everything, with what a page must not take for markup."""
    errors = {"output_error": 1e-7, "gradient_error": 2e-7}
    eager, compiled = ("identity", "eager", "sdpa", "flex"), ("identity", "sdpa", "attnspan")
    cells = [Cell(name, "eager", "packed", leaks="", **errors) for name in eager]
    cells.append(Cell("attnspan", "eager", "packed", calls=2, leaks="document 0 <b>", **errors))
    cells += [Cell(name, "compiled", "packed", graphs=2, shapes=3, **errors) for name in compiled]
    cells.append(Cell("flex", "compiled", "packed", "compile", "no <script>", shapes=3))
    nan = Cell("attnspan", "eager", "plain", output_error=float("inf"), gradient_error=1.0)
    rows = (
        Row("llama", "transformers", "decoder", tuple(cells), (Generation("dynamic", equal=True),)),
        Row("<i>odd</i>", "diffusers", "diffusion", (Cell("eager", "eager", "plain", **errors), nan)),
        Row("crashed", "transformers", "encoder", reason="the process ended with signal SIGSEGV"),
    )
    times = {"attnspan": Timing((1.0, 1.1)), "sdpa": Timing((2.0, 2.2))}
    speed = Speed("llama", "transformers", "packed", 2048, times, Interval(2.0, 1.9, 2.1, 9), False, 8192)
    speed = dataclasses.replace(speed, peaks={"attnspan": 1 << 30, "sdpa": 3 << 30})
    other = Speed("bert", "transformers", "padded", 2048, reasons={"time": "no compiler"})
    return ZooResults(
        {"cpu": "a machine"}, {"backend": "aot_eager"}, rows, (speed, other), {"rwkv": "no attention"}
    )


@pytest.mark.parametrize("width", [70, 200])
def test_the_table_fits_and_says_what_is_wrong(width):
    out = io.StringIO()
    show_zoo(sample_results(), Console(file=out, width=width))
    text = " ".join(out.getvalue().split())
    said = ("passes all checks in 0 of 3", "llama, eager packed: leaks: document 0 <b>", "2.00x", "3.00x")
    assert [words for words in said if words not in text] == []


def test_a_file_becomes_a_page_and_the_tables_between_marks(tmp_path, monkeypatch, attnspan):
    results = sample_results()
    results.save(tmp_path / "zoo.json.gz")
    monkeypatch.chdir(tmp_path)

    tables = Path("zoo.md")
    tables.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    code, said, _ = attnspan("zoo", *["--show", "zoo.json.gz", "--page", "zoo.html", "--markdown", "zoo.md"])
    assert code == 0
    assert "llama" in said
    page = Path("zoo.html").read_text(encoding="utf-8")
    assert page.count('data-attention="') == sum(len(row.cells) for row in results.rows)
    found = [x in page for x in ("&lt;i&gt;odd&lt;/i&gt;", "<i>odd", "no <script>")]
    assert found == [True, False, False]
    text = tables.read_text()
    assert (text.startswith(f"before\n{BEGIN}\n"), text.endswith(f"{END}\nafter\n")) == (True, True)
    assert "old" not in text
    for line in (
        "| **median of 1** |  |  |  | **2.00x** |  |  | **3.00x** |  |",
        "| rwkv | no attention |",
        "| architectures that compile to one graph | - | 1 of 1 | 0 of 1 | 1 of 1 |",
    ):
        assert line in text
    tables.write_text("no marks")
    for given, wanted in (
        ("--show zoo.json.gz --markdown zoo.md", "Add these lines, or pass a new file"),
        ("--layouts dense", "--layouts: expected some of plain, packed, padded"),
        ("--library keras", "--library: expected some of transformers, diffusers"),
        ("--show zoo.json.gz --speed", "--show"),
        ("--show missing.json", "no such file"),
    ):
        code, _, said = attnspan("zoo", *given.split())
        assert (code, wanted in said) == (2, True)
    assert tables.read_text() == "no marks"


@pytest.mark.slow
def test_the_page_of_the_site_shows_the_results_file():
    root = Path(__file__).parents[3]
    _, _, after = (root / "docs" / "zoo.md").read_text(encoding="utf-8").partition(BEGIN)
    shown = after.partition(END)[0].strip()
    assert shown == markdown_of(ZooResults.load(root / "benchmarks/results/zoo.json.gz")).strip()


#: Softcaps and windows, chunks, sinks, latents and experts, biases and cross attention, encoders.
FAMILIES = {
    "gemma2": ("attnspan", "compiled", "padded"),
    "llama4_text": ("attnspan", "eager", "packed"),  # padded has ties between experts
    "gpt_oss": ("attnspan", "eager", "packed"),
    "deepseek_v3": ("attnspan", "eager", "plain"),
    "t5": ("attnspan", "eager", "padded"),
    "modernbert": ("attnspan", "eager", "packed"),
    "bart": ("sdpa", "eager", "padded"),
}
MORE = ("llama", "gemma3_text", "mixtral", "bert", "phi3")
WAYS = list(product(("attnspan", "sdpa"), ("eager", "compiled"), ("padded", "packed", "plain")))
PAIRS = [(name, *way) for name, way in FAMILIES.items()]
PAIRS += [
    pytest.param(name, *way, marks=pytest.mark.long)
    for name, way in product((*FAMILIES, *MORE), WAYS)
    if FAMILIES.get(name) != way
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "implementation", "mode", "layout"), PAIRS)
def test_families_run_exactly_and_do_not_leak(name, implementation, mode, layout):
    pytest.importorskip("transformers")
    from attnspan_lab.zoo.transformers import architectures

    architecture = next(x for x in architectures() if x.name == name)
    keeper = Keeper(architecture, QUICK)
    layout = layout if layout in keeper.layouts() else "padded"
    ways = ("identity", "eager"), ("eager", "eager"), (implementation, mode)
    made = [keeper.run(Key(*way, layout)) for way in ways]
    row = Row(name, "transformers", architecture.kind, tuple(made))
    cell = row.cells[-1]
    if cell.failed == "build" and implementation != "attnspan":
        pytest.skip(cell.reason)
    assert complaints(row, implementation) == []
    assert is_exact(row, cell)
    assert cell.calls if implementation == "attnspan" else not cell.calls

"""Tables fit their terminal and leave nothing out that a reader must know."""

import io
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from attnspan.tools.bench.samples import Ratio, Timing
from attnspan.tools.bench.targets import targets
from rich.console import Console

from attnspan.tools.bench.cells import Ceilings, Cell, Run, Workload
from attnspan.tools.bench.compare import compare
from attnspan.tools.bench.results import Rate, Results, TrainingCell
from attnspan.tools.bench.table import show_comparison, show_results, show_summary
from attnspan.tools.bench.workloads import grid

CEILINGS = Ceilings({"amx_bf16": 4e12, "dot_bf16": 1e12, "fma_f32": 5e11}, 1e10)
WORK = Workload(
    "documents-corpus-32k", "documents", 1, 32, 8, 32768, 32768, 128, 128, "bfloat16", "causal & corpus(0)"
)
OURS = Run("attnspan", execute=Timing((1.0,)), utilisation=0.97, peak_memory=3 << 30, note="back end cpu")
DENSE = Run(
    "sdpa-dense-mask",
    execute=Timing((130.0,)),
    ratio=Ratio(130.0, 128.0, 133.0, 5),
    noisy=True,
    peak_memory=9 << 30,
)
JAX = Run("jax", execute=Timing((9.0,)), pipelined=Timing((3.0,)), ratio=Ratio(9.0, 8.5, 9.4, 5))
FLEX = Run("flex", reason="it has no backward pass on CPU")
CELL = Cell(WORK, "forward+backward", 10**9, 4.5e11, 1e9, (OURS, DENSE, JAX, FLEX))
RESULTS = Results({"cpu": "a machine", "threads": 2, "isa": "amx"}, CEILINGS, (CELL,))


def _printed(show, *args, width):
    stream = io.StringIO()
    show(*args, Console(file=stream, width=width))
    text = stream.getvalue()
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text, "nothing is cut short"
    return text


@pytest.mark.parametrize("width", [100, 160])
def test_a_table_fits_and_holds_every_figure(width):
    text = " ".join(_printed(show_results, RESULTS, width=width).split())
    for part in (
        "a machine, 2 threads, amx",
        "fma_f32 500 GFLOP/s, dot_bf16 1,000 GFLOP/s, amx_bf16 4,000 GFLOP/s, read 10.0 GB/s",
        "documents, forward+backward",
        "documents-corpus-32k bf16",
        "45/11 %",  # of the dot products' ceiling, of the matrix unit's
        "130 128-133 ~",
        "3.0 GiB",
        "!3.00 s",
        "nowhere flex: it has no backward pass on CPU",
        "the machine is too noisy for 1 of 1 cells",
        "the pipelined figure is the device's",
    ):
        assert part in text, part


def test_a_wide_terminal_gets_more():
    wide, narrow = (_printed(show_results, RESULTS, width=width) for width in (160, 100))
    for part in ("32/8x32768 D128", "97%", "back end cpu"):
        assert part in wide
        assert part not in narrow


def test_what_is_bound_by_memory_shows_its_share_of_the_bandwidth():
    decode = replace(CELL, flops=1e9, bytes=2.5e9, runs=(OURS, FLEX))
    for width in (100, 160):
        text = _printed(show_results, replace(RESULTS, cells=(decode,)), width=width)
        assert "read " in text
        assert "25%" in text
        assert " read  " not in _printed(show_results, RESULTS, width=width)


def test_a_reason_is_said_once_where_it_holds_everywhere_and_where_it_holds_otherwise():
    other = replace(CELL, workload=replace(WORK, name="other"), mode="forward", runs=(OURS, JAX))
    text = _printed(show_results, replace(RESULTS, cells=(CELL, other)), width=160)
    assert "  not flex: it has no backward pass on CPU" in text
    assert "nowhere" not in text
    text = _printed(show_results, replace(RESULTS, cells=(CELL, CELL)), width=160)
    assert text.count("it has no backward pass on CPU") == 1


def test_training_and_an_interrupt_are_shown():
    training = (TrainingCell("sdpa", tokens_per_second=Rate((12345.0,)), ratio=Ratio(1.5, 1.4, 1.6, 5)),)
    text = _printed(show_results, replace(RESULTS, training=training, complete=False), width=100)
    assert "12,345" in text
    assert "stopped before the last cell" in text


def _grid_results(seconds=2.0):
    cells = []
    for work in grid():
        # Ratios 1, 2, 4, 8 at the lengths of the mean: their geometric mean is known.
        ratio = {1024: 1.0, 2048: 2.0, 4096: 4.0, 8192: 8.0}.get(work.k_len, 0.5)
        found = Ratio(ratio, ratio * 0.9, ratio * 1.1, 9)
        peer = Run("sdpa-flash", execute=Timing((seconds * ratio,)), ratio=found)
        runs = (Run("attnspan", execute=Timing((seconds,))), peer)
        cells.append(Cell(work, "forward", 10, 1e12, 1e9, runs))
    return Results({"cpu": "c"}, CEILINGS, tuple(cells))


def test_the_summary_is_the_table_of_targets():
    found = {(t.dtype, t.mask): t for t in targets(_grid_results())}
    assert len(found) == 6
    target = found["bfloat16", "causal"]
    assert target.mean == pytest.approx(64 ** (1 / 4))
    assert len(target.mean_ratios) == 8
    assert target.slowest[1].median == 0.5
    assert target.losses == 4 * 3
    assert target.reached(64) == {"dot_bf16": pytest.approx(0.5), "amx_bf16": pytest.approx(0.125)}
    assert target.share(64) == pytest.approx(0.125)
    text = _printed(show_summary, _grid_results(), width=100)
    assert "2.83" in text
    assert "50/13 %" in text
    assert "12/28" in text
    assert _printed(show_results, _grid_results(), width=100).count("causal-d64-s2048") == 3


def test_a_comparison_names_the_cell_and_the_verdict():
    slow = replace(OURS, execute=Timing((1.5, 1.5, 1.5)))
    new = replace(RESULTS, environment={"cpu": "b"}, cells=(replace(CELL, runs=(slow,)),))
    text = _printed(show_comparison, compare(RESULTS, new), width=100)
    assert "another machine or setting: cpu: a machine, then b" in text
    assert "documents-corpus-32k bfloat16" in text
    assert "slower" in text
    assert "1 cells compared: 1 regressions" in text


def test_the_page_s_own_sample_prints():
    sys.path.insert(0, str(Path(__file__).parents[1] / "report"))
    try:
        from sample_results import sample_results
    finally:
        sys.path.pop(0)
    _printed(show_results, sample_results(), width=160)

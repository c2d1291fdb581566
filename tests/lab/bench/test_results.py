"""The file: written whole, read whole, refused by name; two of them compared."""

import gzip
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from attnspan.errors import OptionError
from attnspan_lab.bench.cells import Ceilings, Cell, Run, Timing, Workload
from attnspan_lab.bench.compare import compare
from attnspan_lab.bench.results import SCHEMA, MonitorRecord, PhaseShares, Results, TrainingCell
from attnspan_lab.bench.statistics import Interval, Samples, paired
from attnspan_lab.files import read_json

WORK = Workload("w", "dense", 1, 8, 2, 64, 128, 32, 16, "bfloat16", "full", "a note")
OURS = Run("attnspan", execute=Timing((1.0, 2.0), calls=3), utilisation=0.5, error=0.0)
TWICE = Interval(2.0, 1.9, 2.1, 7)
PEER = Run("jax", execute=Timing((4.0,)), pipelined=Timing((2.0,)), ratio=TWICE, noisy=True)
REFUSED = Run("flex", reason="it has no backward pass on CPU")
CELL = Cell(WORK, "forward", 10, 3e9, 1e6, (OURS, PEER, REFUSED))
STEPS = TrainingCell("sdpa", seconds=Timing((0.5,)), tokens_per_second=Samples((9.0,)), peak_memory=5)
WHOLE = Results(
    environment={"cpu": "c", "versions": {"torch": None}, "load_average": [0.5]},
    ceilings=Ceilings({"fma_f32": 1e9, "dot_bf16": 4e9, "amx_bf16": 2e10}, 1e9, {"fma_f32": "loop"}),
    cells=(CELL,),
    training=(STEPS,),
    monitor=(MonitorRecord(1, 0.5, 100, PhaseShares(data=0.25), attention_seconds=0.1),),
    complete=False,
)
COMMITTED = sorted((Path(__file__).parents[3] / "benchmarks" / "results").glob("*.json.gz"))
# tests/lab/zoo reads the zoo's.
COMMITTED = [path for path in COMMITTED if not path.stem.startswith("zoo")]


@pytest.mark.parametrize("name", ["results.json", "results.json.gz"])
def test_what_is_written_is_what_is_read_and_nothing_is_left(tmp_path, monkeypatch, name):
    path, written, write = tmp_path / "new" / name, [], Path.write_bytes
    monkeypatch.setattr(Path, "write_bytes", lambda at, x: (written.append(at.suffix), write(at, x)))
    WHOLE.save(path)
    assert written == [".part"], "a reader never sees a half"
    assert Results.load(path) == WHOLE
    first = path.read_bytes()
    assert first.startswith(b"\x1f\x8b" if name.endswith(".gz") else b"{")
    replace(WHOLE, cells=()).save(path)
    assert Results.load(path).cells == ()
    WHOLE.save(path)
    assert path.read_bytes() == first, "equal results are equal files, without a time stamp"
    assert [found.name for found in path.parent.iterdir()] == [name]
    with pytest.raises(OptionError, match="expected a writable file, got Is a directory"):
        WHOLE.save(tmp_path)
    assert not list(tmp_path.parent.glob("*.part")), "a draft that fails goes"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (f'{{"schema": {SCHEMA + 1}}}', rf"expected results of schema {SCHEMA}, got schema {SCHEMA + 1}\."),
        ("{}", "got a file without a schema"),
        ('{"schema": 3, "sells": []}', "expected the fields environment, ceilings, .* got schema, sells"),
        ('{"schema": 3, "complete": 1}', "complete: expected bool, got 1"),
        ('{"schema"', "expected a results file"),
        (None, r"expected a results file, got no such file\. Check the path"),
        (lambda x: x[:-20], "expected a results file, got "),
        (lambda x: x[:10] + b"\xff" * 40, "expected a results file, got "),
    ],
)
def test_another_file_or_a_damaged_one_is_refused_by_name(tmp_path, content, message):
    path = tmp_path / "results.json.gz"
    WHOLE.save(path)
    damaged = content(path.read_bytes()) if callable(content) else gzip.compress((content or "").encode())
    path.write_bytes(damaged)
    with pytest.raises(OptionError, match=message):
        Results.load(path if content is not None else tmp_path / "none.json")


@pytest.mark.slow
@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_the_committed_results_are_read(path):
    data = read_json(path)
    if isinstance(data, dict) and "schema" in data:
        results = Results.load(path)
        assert results.cells or results.training
        roof = results.roof
        shares = [cell.share(run, roof) or 0.0 for cell in results.cells for run in cell.runs]
        assert max(shares, default=0.0) <= 1.0


def test_rates_and_shares_of_a_cell():
    roof = WHOLE.ceilings
    assert CELL.flops_per_second(OURS) == 2e9
    assert CELL.seconds_per_pair(OURS) == 0.15
    assert CELL.share(OURS, roof) == 0.1
    assert CELL.bandwidth_share(OURS, roof) == pytest.approx(1e6 / 1.5 / 1e9)
    assert replace(CELL, bytes=1e12).bandwidth_share(OURS, roof) is None, "from a cache"
    assert CELL.flops_per_second(REFUSED) is CELL.share(REFUSED, roof) is None
    assert roof.best("float16") == ("fma_f32", 1e9), "it has none of its own"
    assert (roof.attainable("bfloat16", 2.0), roof.attainable("bfloat16", 1e6)) == (2e9, 2e10)
    assert [replace(CELL, basis="pipelined").seconds(run) for run in (PEER, OURS)] == [2.0, 1.5]
    assert (CELL.seconds(PEER), PEER.waiting) == (4.0, 2.0)
    # No run stands above its ceiling, which is raised only where a run exceeds it.
    fast = replace(CELL, flops=9e10)  # 9e10 FLOP/s in its fastest sample
    roof = replace(WHOLE, cells=(CELL, fast)).roof
    assert roof.flops == {"fma_f32": 1e9, "dot_bf16": 4e9, "amx_bf16": 9e10}
    assert roof.notes["amx_bf16"].startswith("the fastest sample of attnspan at w bfloat16 forward")
    assert fast.share(OURS, roof) < 1
    assert WHOLE.roof == WHOLE.ceilings


def _results(ours, peer=None, noise=0.01, seed=0, name="w", cpu="c"):
    def samples(scale, seed):
        return tuple(scale * np.exp(noise * np.random.default_rng(seed).standard_normal(40)))

    mine = samples(ours, seed)
    runs = [Run("attnspan", execute=Timing(mine))]
    if peer is not None:
        theirs = samples(peer, seed + 100)
        runs.append(Run("sdpa-flash", execute=Timing(theirs), ratio=paired(mine, theirs)))
    cell = Cell(replace(WORK, name=name), "forward", 36, 1.0, 1.0, tuple(runs))
    return Results({"cpu": cpu}, cells=(cell,))


@pytest.mark.parametrize(
    ("old", "new", "noise", "cpu", "verdict"),
    [
        ((1.0,), (1.1,), 0.01, "c", "slower"),
        ((1.0,), (0.9,), 0.01, "c", "faster"),
        ((1.0,), (1.02,), 0.1, "c", "same"),
        ((1.0,), (1.01,), 1e-4, "c", "same"),  # within the tolerance
        ((1.0, 2.0), (1.3, 2.6), 0.01, "c", "slower, as the peer: the machine"),
        ((1.0, 2.0), (1.3, 2.0), 0.01, "c", "slower"),
        ((1.0, 2.0), (0.8, 1.6), 0.01, "c", "faster, as the peer: the machine"),
        # A faster machine does not hide a slower kernel.
        ((1.0, 2.0), (1.0, 1.5), 0.01, "c", "lost ground"),
        ((1.0, 2.0), (0.9, 1.0), 0.01, "c", "lost ground"),
        # On another machine, only ratios are compared.
        ((1.0,), (3.0,), 0.01, "d", "another machine"),
        ((1.0, 2.0), (3.0, 6.0), 0.01, "d", "same"),
        ((1.0, 2.0), (0.5, 0.5), 0.01, "d", "lost ground"),
        ((1.0, 2.0), (3.0, 9.0), 0.01, "d", "faster"),
    ],
)
def test_regressions_are_found_and_noise_and_machines_are_not_mistaken_for_them(
    old, new, noise, cpu, verdict
):
    for seed in range(1, 4):
        comparison = compare(_results(*old, noise=noise), _results(*new, noise=noise, seed=seed, cpu=cpu))
        assert [change.verdict for change in comparison.changes] == [verdict]
        assert bool(comparison.regressions) == (verdict in ("slower", "lost ground"))
        assert comparison.machine == (("cpu: c, then d",) if cpu == "d" else ())


def test_a_change_of_one_cell_among_many_needs_to_be_beyond_chance():
    def file(seed):
        found = [_results(1.0, noise=0.2, seed=seed + n, name=f"{n}").cells[0] for n in range(0, 6000, 50)]
        return Results(cells=tuple(found))

    assert not compare(file(0), file(1)).regressions, "120 cells of noise"


def test_cells_that_came_and_went_are_named_and_a_workload_that_no_longer_runs_is_a_regression():
    old = _results(1.0)
    refused = replace(old.cells[0], runs=(Run("attnspan", reason="no backend"),))
    new = replace(old, environment={"cpu": "d"}, cells=(refused,))
    (change,) = compare(old, new).changes
    assert (change.verdict, change.note) == ("gone", "it ran; now: no backend")
    assert not compare(new, old).regressions
    comparison = compare(_results(1.0, name="a"), _results(1.0, name="b"))
    assert (comparison.appeared, comparison.disappeared) == (("b bfloat16 forward",), ("a bfloat16 forward",))
    assert comparison.changes == ()
    for other in ({"workload": replace(WORK, k_len=16)}, {"cold": True}):
        grown = replace(old.cells[0], **other)
        assert not compare(old, Results(cells=(grown,))).changes, "it is another cell"

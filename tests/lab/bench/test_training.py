"""Whole training steps: kinds of attention and ranks take turns; memory is that of new processes."""

from __future__ import annotations

import re
import sys
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console

from attnspan.errors import OptionError
from attnspan_lab.bench import training
from attnspan_lab.bench.results import Results
from attnspan_lab.bench.table import show_results
from attnspan_lab.bench.timing import MeasurementError
from attnspan_lab.bench.training import RowStepper as Stepper
from attnspan_lab.bench.training import measure_ranks, measure_training, steps_peak
from attnspan_lab.files import to_plain
from train.config import TrainConfig
from train.parallelize import open_ranks

# The worlds of processes that tests over several ranks share.
sys.path.append(str(Path(__file__).parents[2] / "parallel"))
from worlds import world

KINDS = ["attnspan", "sdpa", "sdpa-documents"]


@pytest.fixture
def steps(monkeypatch):
    """(attention, hash of the batch) of every step; each takes a known time by its attention."""
    taken, real = [], Stepper.step
    seconds = dict(zip(KINDS, (1.0, 2.0, 4.0), strict=True))

    def step(self, batch, index):
        taken.append((self.config.attention, hash(batch.tokens.numpy().tobytes())))
        return real(self, batch, index)._replace(seconds=seconds[self.config.attention])

    monkeypatch.setattr(Stepper, "step", step)
    return taken


def test_kinds_take_balanced_turns_on_the_same_batches_and_figures_are_those_of_the_steps(
    tiny, steps, tmp_path
):
    found = ours, dense, documents = measure_training(tiny(), rounds=10, memory=False)
    # The first turn is the warm-up; later ones come in random order, and then in its reverse.
    turns = [steps[turn : turn + 3] for turn in range(3, 33, 3)]
    orders = [[kind for kind, _ in turn] for turn in turns]
    assert all(sorted(order) == sorted(KINDS) for order in orders)
    assert [order[::-1] for order in orders[::2]] == orders[1::2]
    batches = [{batch for _, batch in turn} for turn in turns]
    assert all(len(same) == 1 for same in batches)
    assert len(set.union(*batches)) > 1
    assert [cell.attention for cell in found] == KINDS
    assert (ours.seconds.samples, ours.tokens_per_second.samples) == ((1.0,) * 10, (96.0,) * 10)
    assert documents.tokens_per_second.median == 24.0
    assert (ours.ratio, dense.ratio.median, dense.ratio.pairs, documents.ratio.median) == (None, 2.0, 10, 4.0)
    assert all(cell.peak_memory is None and cell.reason is None for cell in found)
    described = "2 blocks of width 32, 4 heads on 2, 2 x 48 tokens, float32, ac none, eager, 1 threads"
    assert (ours.note, dense.noisy) == (described, False)
    Results(training=found).save(tmp_path / "results.json")
    assert Results.load(tmp_path / "results.json").training == found


def test_a_wide_interval_is_noise(tiny, monkeypatch):
    times = {"attnspan": [1.0] * 10, "sdpa": [1.0, 2.0] * 5}
    monkeypatch.setattr(training, "_step_times", lambda *_: times)
    _, dense = measure_training(tiny(), kinds=("sdpa",), memory=False)
    assert (dense.noisy, dense.ratio.low, dense.ratio.high) == (True, 1.0, 2.0)


def test_peaks_are_those_of_new_processes(tiny, monkeypatch):
    asked = []

    def peak(what, _module, task, *, remedy):
        asked.append(TrainConfig(**task["config"]))
        if what == "memory of sdpa":
            raise MeasurementError(what, expected="a figure", got="killed", remedy=remedy)
        return len(asked)

    seconds = dict.fromkeys(KINDS, [1.0] * 9)
    monkeypatch.setattr(training, "_step_times", lambda *_: seconds)
    monkeypatch.setattr(training, "fresh_process", peak)
    monkeypatch.setattr(training, "faster_dtype", lambda: "bfloat16")
    torch.set_num_threads(1)
    cells = measure_training(tiny(dtype="auto", threads=0), rounds=9)
    assert [config.attention for config in asked] == [cell.attention for cell in cells]
    assert [cell.peak_memory for cell in cells] == [1, None, 3]
    assert cells[1].note.endswith("; memory of sdpa: expected a figure, got killed. Try --no-memory.")
    # What is open is settled before the first process.
    assert {(config.dtype, config.threads) for config in asked} == {("bfloat16", 1)}
    assert "bfloat16" in cells[0].note
    measure_training(tiny(threads=2), rounds=9, kinds=(), memory=False)
    assert torch.get_num_threads() == 1


@pytest.mark.long
def test_the_peak_is_of_the_steps_and_shows_what_attention_keeps(tiny, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    # Rows whose dense mask alone, 4 bytes an element as SDPA takes it, has 64 MiB.
    shape = {"seq_len": 4096, "batch_size": 1, "layers": 1, "heads": 1, "kv_heads": 1}
    ours, dense = measure_training(tiny(**shape), rounds=9, kinds=("sdpa",))
    assert dense.peak_memory > ours.peak_memory + 2**25


def test_the_peak_leaves_out_what_compiling_needed(tiny, monkeypatch):
    happened = []
    monkeypatch.setattr(Stepper, "warm_up", lambda *_: happened.append("compiled"))
    monkeypatch.setattr(Stepper, "step", lambda *_: happened.append("step"))
    monkeypatch.setattr(training, "forget_peak", lambda: happened.append("forgotten"))
    monkeypatch.setattr(training, "resident_peak", lambda: happened.append("asked") or 123)
    assert steps_peak(tiny()) == 123
    assert happened == ["compiled", "step", "forgotten", "step", "step", "step", "asked"]


def _rank(task):
    config = TrainConfig(**task["config"])
    with open_ranks(config) as ranks:
        return to_plain(training._compare_with_one(config, ranks, task["rounds"]))


@pytest.mark.slow
@pytest.mark.parametrize("by_torchrun", [False, pytest.param(True, marks=pytest.mark.long)])
def test_two_ranks_compute_what_one_does(tiny, tmp_path, monkeypatch, by_torchrun):
    if not by_torchrun:
        monkeypatch.setattr(training, "fresh_process", lambda *given, **_: world(2).run(_rank, given[2])[0])
    times = measure_ranks(tiny(cp=2, accumulate=2), rounds=3)
    # Sums of the same float32 numbers in other orders.
    assert max(times.losses, times.norms) <= 20 * torch.finfo(torch.float32).eps
    assert len(times.all_ranks) == len(times.one_rank) == len(times.sdpa) == 3
    assert min(times.all_ranks + times.one_rank + times.sdpa) > 0
    # Raw samples are kept, and the table is made of them.
    Results(ranks=times).save(tmp_path / "results.json.gz")
    kept = Results.load(tmp_path / "results.json.gz")
    assert kept.ranks == times
    console = Console(width=80, record=True, file=StringIO())
    show_results(kept, console)
    assert re.search(r"2 ranks +\S+ m?s.*1 rank +.*1 rank, SDPA", console.export_text(), re.DOTALL)


@pytest.mark.long
def test_ranks_that_fail_say_so(tiny):
    with pytest.raises(MeasurementError, match="ranks: expected a process that prints its result, got"):
        measure_ranks(tiny(cp=2, data="/nowhere"))


def test_impossible_options_are_refused(tiny):
    with pytest.raises(OptionError, match=r"attention: expected one of attnspan, .* got 'flash'"):
        measure_training(tiny(), kinds=("flash",))
    with pytest.raises(OptionError, match="rounds: expected 2 or more, got 1"):
        measure_ranks(tiny(cp=2), rounds=1)

"""A cell lists every peer; wrong and failing ones are found before they are timed; nothing is lost."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from fake_devices import FakeProbe, VirtualDevice, World

from attnspan_lab.bench import runner
from attnspan_lab.bench.cells import Workload
from attnspan_lab.bench.peers import Ready, peers_by_name
from attnspan_lab.bench.results import Results
from attnspan_lab.bench.runner import Plan, measure_cell, peers_for, run_plan
from attnspan_lab.bench.timing import Budget, MeasurementError
from attnspan_lab.bench.workloads import grid

WORK = Workload("tiny", "own", 1, 2, 2, 16, 16, 8, 8, "float32", "causal")
QUICK = Budget(seconds=0.02, sample_seconds=1e-5)
OURS = peers_by_name()["attnspan"]


class Changed:
    """attnspan with its result changed, or refusing."""

    def __init__(self, change=lambda out: out, name="changed", reason=None):
        self.name, self._change, self._reason = name, change, reason

    def refuses(self, _job):
        return self._reason

    def prepare(self, job):
        ready = OURS.prepare(job)
        return replace(ready, call=lambda: self._change(ready.call()))


def _cell(*peers, mode="forward", **how):
    return measure_cell(WORK, mode, [OURS, *peers], QUICK, **how)


def test_a_cell_has_every_figure_of_a_peer_that_ran():
    ours, peer = _cell(Changed()).runs
    assert (ours.peer, ours.ratio) == ("attnspan", None)
    assert peer.ratio.pairs >= 9
    assert peer.execute.median > 0
    assert peer.compile_seconds >= 0
    assert peer.error == 0.0
    assert ours.utilisation > 0
    assert ours.note.startswith("backend ")


@pytest.mark.parametrize("mode", ["forward", "forward+backward"])
def test_a_wrong_result_is_never_timed(mode):
    def change(result):
        return result * 1.01 if mode == "forward" else (result[0], -result[1], *result[2:])

    run = _cell(Changed(change), mode=mode).runs[1]
    assert run.reason.startswith("its result differs from attnspan by ")
    assert run.execute is run.ratio is None
    assert run.error > 1e-3


def test_failures_and_nan_are_reasons_and_the_others_go_on():
    def fail(out):
        raise RuntimeError("no kernel image\nand more")

    cell = _cell(Changed(fail), Changed(lambda out: out * float("nan"), "nan"), Changed(name="after"))
    assert cell.run("changed").reason == "it failed: RuntimeError: no kernel image"
    assert cell.run("nan").reason.startswith("its result differs from attnspan by nan")
    assert cell.run("after").ran


def _nan(out):
    return out * float("nan")


@pytest.mark.parametrize(
    ("ours", "reason"),
    [
        (Changed(name="attnspan", reason="not today"), "not today"),
        (Changed(_nan, "attnspan"), "its result contains infinity or NaN"),
    ],
)
def test_peers_run_and_show_no_ratio_where_attnspan_cannot(ours, reason):
    peers = [ours, Changed(name="one"), Changed(name="other"), Changed(lambda out: -out, "wrong")]
    cell = measure_cell(WORK, "forward", peers, QUICK)
    assert cell.ours.reason == reason
    assert [(run.ran, run.ratio) for run in cell.peers] == [(True, None), (True, None), (False, None)]
    assert cell.peers[2].reason.startswith("its result differs from one by 2 ")


@pytest.mark.parametrize("name", ["attnspan", "changed"])
def test_a_call_that_fails_while_it_is_timed_is_the_reason_of_its_peer(name):
    calls = iter(range(10**9))

    def fail(out):
        if next(calls) == 6:
            raise RuntimeError("out of memory")
        return out

    peers = [Changed(fail if name == x else lambda out: out, x) for x in ("attnspan", "changed", "other")]
    cell = measure_cell(WORK, "forward", peers, QUICK)
    assert cell.run(name).reason == "the timed call failed: RuntimeError: out of memory"
    assert [run.ran for run in cell.runs if run.peer != name] == [True, True]
    assert cell.run("other").ratio is None or name != "attnspan"


def test_inputs_that_do_not_fit_are_the_reason_of_all():
    work = replace(WORK, batch=1 << 40)
    found = [run.reason for run in measure_cell(work, "forward", [OURS, Changed()], QUICK).runs]
    assert len(found) == 2
    assert all(reason.startswith("not enough memory for the inputs: RuntimeError") for reason in found)


def test_a_peer_that_is_timed_on_the_wrong_device_ends_the_measurement():
    class Early(Changed):
        def prepare(self, _job):
            device = VirtualDevice(World(), 0.05, waits=False)
            return Ready(lambda: (device.submit(), torch.zeros(1))[1], device)

    with pytest.raises(MeasurementError, match="expected a call whose work is done"):
        _cell(Early())


def test_memory_that_cannot_be_measured_leaves_the_times():
    def memory(peer, workload, mode):
        if peer.name == "changed":
            raise OSError("no process")
        return 4096

    ours, peer = _cell(Changed(), memory=memory).runs
    assert (ours.peak_memory, peer.peak_memory, peer.ran) == (4096, None, True)
    assert peer.note.endswith("memory: OSError: no process")


@pytest.mark.parametrize("installed", [True, False])
def test_the_grid_is_against_the_fused_kernels_unless_others_are_named(monkeypatch, installed):
    monkeypatch.setattr(runner, "find_spec", lambda _: installed or None)
    for names, mode, device, wanted in (
        ([], "forward", "cpu", ["attnspan", "sdpa-flash", *(["openvino"] if installed else [])]),
        ([], "forward+backward", "cpu", ["attnspan", "sdpa-flash"]),
        ([], "forward", "cuda", ["attnspan", "sdpa-flash", "sdpa-efficient", "sdpa-cudnn"]),
        (["jax"], "forward", "cpu", ["attnspan", "jax"]),
    ):
        assert [peer.name for peer in peers_for(grid()[0], mode, names, device)] == wanted
    assert len(peers_for(WORK, "forward", [], "cpu")) == len(peers_by_name())


def _plan(**changes):
    works = tuple(replace(WORK, name=name) for name in "abc")
    return Plan(works, ("forward",), ("sdpa-flash",), budget=QUICK, probe=FakeProbe(), **changes)


def test_a_run_writes_after_every_cell(tmp_path):
    path, seen = tmp_path / "results.json", []

    def after(cell):
        on_disk = Results.load(path)
        seen.append((cell.workload.name, len(on_disk.cells), on_disk.complete))

    results = run_plan(_plan(), path=path, after=after)
    assert seen == [("a", 1, False), ("b", 2, False), ("c", 3, False)]
    assert results.complete
    assert Results.load(path) == results


def test_an_interrupt_keeps_what_was_measured(tmp_path):
    def before(workload, _mode, at="c"):
        if workload.name == at:
            raise KeyboardInterrupt

    results = run_plan(_plan(), path=tmp_path / "results.json", before=before)
    assert [cell.workload.name for cell in results.cells] == ["a", "b"]
    assert not results.complete
    assert Results.load(tmp_path / "results.json") == results
    # Before the first cell, an older file is worth more.
    at_once = partial(before, at="a")
    assert run_plan(_plan(), path=tmp_path / "results.json", before=at_once).cells == ()
    assert Results.load(tmp_path / "results.json") == results


def test_decoding_is_measured_with_empty_caches_unless_told_otherwise(monkeypatch):
    evicted = []
    monkeypatch.setattr(runner, "cache_evictor", lambda _: lambda: evicted.append(1))
    decode = replace(WORK, family="decode", q_len=1)
    for cold, wanted in ((None, [True, False]), (False, [False, False]), (True, [True, True])):
        results = run_plan(replace(_plan(), workloads=(decode, WORK), cold=cold))
        assert [cell.cold for cell in results.cells] == wanted
        for cell in results.cells:
            assert (cell.ours.execute.calls == 1) or not cell.cold
    assert len(evicted) >= 3 * 2 * 9


def test_threads_are_set_for_the_run_only():
    before = torch.get_num_threads()
    wanted, seen = 1 if before > 1 else 2, []
    results = run_plan(_plan(threads=wanted), before=lambda *_: seen.append(torch.get_num_threads()))
    assert set(seen) == {wanted}
    assert results.environment["threads"] == wanted
    assert results.ceilings.flops["fma_f32"] == 1e12 * wanted
    assert torch.get_num_threads() == before

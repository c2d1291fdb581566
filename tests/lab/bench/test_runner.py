"""A cell lists every peer; wrong and failing ones are found before they are timed; nothing is lost."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from fake_devices import FakeProbe

from attnspan_lab.bench import runner
from attnspan_lab.bench.cells import Workload
from attnspan_lab.bench.peers import peers_by_name
from attnspan_lab.bench.results import Results
from attnspan_lab.bench.runner import Plan, measure_cell, peers_for, run_plan
from attnspan_lab.bench.timing import Budget
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


def _cell(*peers, ours=OURS, mode="forward", **how):
    return measure_cell(WORK, mode, [ours, *peers], QUICK, **how)


def _nan(out):
    return out * float("nan")


def _fail(out):
    raise RuntimeError("no kernel image\nand more")


def _negative(out):
    return out[0], -out[1], *out[2:]


def test_a_cell_has_every_figure_of_a_peer_that_ran():
    def memory(peer, workload, mode):
        if peer.name == "changed":
            raise OSError("no process")
        return 4096

    ours, peer = _cell(Changed(), memory=memory).runs
    assert (ours.peer, ours.ratio, peer.error) == ("attnspan", None, 0.0)
    assert ours.note.startswith("backend ")
    assert min(ours.utilisation, peer.execute.median, peer.ratio.pairs / 9) > 0
    assert peer.compile_seconds >= 0
    # Memory that cannot be measured leaves the times.
    assert (ours.peak_memory, peer.peak_memory) == (4096, None)
    assert peer.note.endswith("memory: OSError: no process")


@pytest.mark.parametrize(
    ("change", "mode", "reason"),
    [
        (lambda out: out * 1.01, "forward", "its result differs from attnspan by 0.01 "),
        (_negative, "forward+backward", "its result differs from attnspan by 2 "),
        (lambda out: out[:-1], "forward+backward", "its result differs from attnspan by inf "),
        (_nan, "forward", "its result differs from attnspan by nan"),
        (_fail, "forward", "it failed: RuntimeError: no kernel image"),
    ],
)
def test_a_wrong_result_is_never_timed_and_the_others_go_on(change, mode, reason):
    cell = _cell(Changed(change), Changed(name="after"), mode=mode)
    wrong = cell.run("changed")
    assert wrong.reason.startswith(reason)
    assert wrong.execute is wrong.ratio is None
    assert cell.run("after").ran


@pytest.mark.parametrize(
    ("ours", "reason"),
    [
        (Changed(name="attnspan", reason="not today"), "not today"),
        (Changed(_nan, "attnspan"), "its result contains infinity or NaN"),
    ],
)
def test_peers_run_and_show_no_ratio_where_attnspan_cannot(ours, reason):
    cell = _cell(Changed(name="one"), Changed(name="other"), Changed(lambda out: -out, "wrong"), ours=ours)
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

    names = ("attnspan", "changed", "other")
    ours, *peers = (Changed(fail if name == x else lambda out: out, x) for x in names)
    cell = _cell(*peers, ours=ours)
    assert cell.run(name).reason == "the timed call failed: RuntimeError: out of memory"
    assert [run.ran for run in cell.runs if run.peer != name] == [True, True]
    assert cell.run("other").ratio is None or name != "attnspan"


def test_inputs_that_do_not_fit_are_the_reason_of_all():
    found = measure_cell(replace(WORK, batch=1 << 40), "forward", [OURS, Changed()], QUICK).runs
    reasons = [run.reason.startswith("not enough memory for the inputs: RuntimeError") for run in found]
    assert reasons == [True, True]


@pytest.mark.parametrize("installed", [True, False])
def test_the_grid_is_against_the_fused_kernels_unless_others_are_named(monkeypatch, installed):
    monkeypatch.setattr(runner, "find_spec", lambda _: installed or None)
    for names, mode, device, wanted in (
        ([], "forward", "cpu", ["sdpa-flash", *(["openvino"] if installed else [])]),
        ([], "forward+backward", "cpu", ["sdpa-flash"]),
        ([], "forward", "cuda", ["sdpa-flash", "sdpa-efficient", "sdpa-cudnn"]),
        (["jax"], "forward", "cpu", ["jax"]),
    ):
        assert [peer.name for peer in peers_for(grid()[0], mode, names, device)] == ["attnspan", *wanted]
    assert len(peers_for(WORK, "forward", [], "cpu")) == len(peers_by_name())


def _plan(**changes):
    works = tuple(replace(WORK, name=name) for name in "abc")
    return Plan(works, ("forward",), ("sdpa-flash",), budget=QUICK, probe=FakeProbe(), **changes)


def test_a_run_writes_after_every_cell_on_its_own_threads_and_an_interrupt_keeps_them(tmp_path):
    path, seen, before = tmp_path / "results.json", [], torch.get_num_threads()
    threads = 1 if before > 1 else 2

    def after(cell):
        on_disk = Results.load(path)
        seen.append((cell.workload.name, len(on_disk.cells), on_disk.complete, torch.get_num_threads()))

    results = run_plan(_plan(threads=threads), path=path, after=after)
    assert seen == [("a", 1, False, threads), ("b", 2, False, threads), ("c", 3, False, threads)]
    assert results.complete
    assert Results.load(path) == results
    assert results.environment["threads"] == threads
    assert results.ceilings.flops["fma_f32"] == 1e12 * threads
    assert torch.get_num_threads() == before

    def stop(at, workload, _mode):
        if workload.name == at:
            raise KeyboardInterrupt

    results = run_plan(_plan(), path=path, before=partial(stop, "c"))
    assert ([cell.workload.name for cell in results.cells], results.complete) == (["a", "b"], False)
    assert Results.load(path) == results
    # Before the first cell, an older file is worth more.
    assert run_plan(_plan(), path=path, before=partial(stop, "a")).cells == ()
    assert Results.load(path) == results


def test_decoding_is_measured_with_empty_caches_unless_told_otherwise(monkeypatch):
    evicted = []
    monkeypatch.setattr(runner, "cache_evictor", lambda _: lambda: evicted.append(1))
    decode = replace(WORK, family="decode", q_len=1)
    for cold, wanted in ((None, [True, False]), (False, [False, False]), (True, [True, True])):
        results = run_plan(replace(_plan(), workloads=(decode, WORK), cold=cold))
        assert [cell.cold for cell in results.cells] == wanted
        assert all(cell.ours.execute.calls == 1 for cell in results.cells if cell.cold)
    assert len(evicted) >= 3 * 2 * 9

"""The monitor: what it makes of marks and counters, what it leaves behind, and that it is no burden."""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import astuple
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from monitored import World, take_step
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from attnspan import causal
from attnspan.errors import OptionError
from attnspan.torch import attention
from attnspan_lab.bench.monitor import Monitor, log, probes
from attnspan_lab.bench.monitor import monitor as module
from attnspan_lab.bench.monitor.log import Thinned
from attnspan_lab.bench.monitor.probes import CudaProbe
from attnspan_lab.bench.results import Evaluation, MonitorRecord, PhaseShares, Results
from train.train import train


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    made = World()
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: made.now))
    monkeypatch.setattr(module, "compile_seconds", lambda: made.compiling)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    yield made
    for monitor in made.monitors:
        monitor.close()


def test_a_record_says_where_the_time_went_and_how_fast_attention_was(world: World, tmp_path: Path) -> None:
    with world.monitor(tmp_path, ceiling=14.0) as monitor:
        world.work(100, flops=1000)  # what was before the loop counts for nothing
        for _ in monitor.data(world.batches([10.0, 10.0])):
            take_step(world, monitor)
            # An evaluation between steps is the host's time, and no step's attention.
            world.work(5, flops=1000)
    first, second = monitor.results().monitor
    assert (first.step, first.seconds, first.tokens, first.tokens_per_second) == (1, 20.0, 50, 2.5)
    assert astuple(first.phases) == pytest.approx((0.5, 0.05, 0.15, 0.2, 0.1, 0.0))
    assert second.seconds == 25.0
    assert second.phases.host == pytest.approx(6 / 25)
    assert sum(astuple(first.phases)) == pytest.approx(1.0)
    assert sum(astuple(second.phases)) == pytest.approx(1.0)
    for record in (first, second):
        assert (record.attention_seconds, record.attention_flops) == (3.0, 14.0)
        assert record.attention_flops_per_second == pytest.approx(14 / 3)
        assert record.ceiling_share == pytest.approx(1 / 3)
    # Of the first step's 20 s on two threads, one thread worked for 10.
    assert first.utilisation == 0.25
    assert first.memory is None or first.memory > 2**20


def _compile(world: World, monitor: Monitor) -> None:
    with monitor.step(), monitor.phase("forward"):
        world.work(10)
        world.compiling += 7


def _communicate(world: World, monitor: Monitor) -> None:
    with monitor.step():
        with monitor.phase("backward"):
            world.work(4)
            with monitor.phase("communication"):
                world.work(2)
                world.compiling += 1
        with monitor.phase("communication"):
            world.work(4)


def _await_data_between(world: World, monitor: Monitor) -> None:
    with monitor.step():
        for _ in monitor.data(world.batches([1.0, 1.0])):
            with monitor.phase("forward"):
                world.work(4)


def _wait_behind_queued_work(world: World, monitor: Monitor) -> None:
    # The device is busy from the end of one step to that of the next, although the host waited 6 s.
    with monitor.step():
        list(monitor.data(world.batches([6.0])))
        world.now -= 6
        with monitor.phase("forward"):
            world.work(10)


@pytest.mark.parametrize(
    ("step", "compiled", "shares"),
    [
        (_compile, 7.0, PhaseShares(forward=0.3, host=0.7)),
        (_communicate, 1.0, PhaseShares(backward=0.4, communication=0.5, host=0.1)),
        (_await_data_between, 0.0, PhaseShares(data=0.2, forward=0.8)),
        (_wait_behind_queued_work, 0.0, PhaseShares(forward=1.0)),
    ],
)
def test_shares_of_a_step(
    world: World, tmp_path: Path, step: Any, compiled: float, shares: PhaseShares
) -> None:
    with world.monitor(tmp_path) as monitor:
        step(world, monitor)
    record = monitor.results().monitor[0]
    assert record.compile_seconds == compiled
    assert astuple(record.phases) == pytest.approx(astuple(shares))


def test_nothing_waits_for_an_asynchronous_device_before_the_end(world: World, tmp_path: Path) -> None:
    world.finished = 0.0
    monitor = world.monitor(tmp_path)
    for finished in (0.0, 5.0, 20.0, 30.0):
        world.finished = max(world.finished, finished)
        take_step(world, monitor)
    assert world.waits == []
    # At the end of the fourth step the device was past the third one's end.
    assert [record.step for record in monitor.results().monitor] == [1, 2, 3]
    monitor.close()
    assert world.waits == [40.0], "one wait, for the last mark"
    assert [record.seconds for record in monitor.results().monitor] == [10.0] * 4


def journal(folder: Path) -> list[dict[str, Any]]:
    """The records of steps; held-out losses have lines of their own."""
    lines = [json.loads(line) for line in (folder / "monitor.jsonl").read_text().splitlines()]
    return [line for line in lines if "held_out" not in line]


def board(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder / "tensorboard" / "monitor")).Reload()


def test_without_counters_there_are_no_attention_figures(world: World, tmp_path: Path) -> None:
    world.totals = None
    with world.monitor(tmp_path) as monitor, monitor.step():
        world.work(1)
    assert monitor.results().monitor[0].attention_flops_per_second is None
    assert "attention/tflops" not in board(tmp_path).Tags()["scalars"]


def test_a_step_that_raises_is_left_out_and_loses_no_other(world: World, tmp_path: Path) -> None:
    with world.monitor(tmp_path) as monitor:
        take_step(world, monitor)
        with suppress(RuntimeError), monitor.step(), monitor.phase("forward"):
            world.work(3)
            raise RuntimeError("a bad batch")
        take_step(world, monitor, number=2)  # The loop may go on.
    assert [line["step"] for line in journal(tmp_path)] == [1, 2]
    records = Results.load(tmp_path / "monitor.json").monitor
    assert [(record.step, record.seconds) for record in records] == [(1, 10.0), (2, 13.0)]
    assert records[1].phases.host == 4 / 13
    assert [event.step for event in board(tmp_path).Scalars("phases/forward")] == [2]


def test_every_step_is_in_the_journal_at_once_and_the_results_file_when_it_is_due(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "time", SimpleNamespace(monotonic=lambda: world.now))
    monitor = world.monitor(tmp_path, save_seconds=15.0)
    saved, path = [], tmp_path / "monitor.json"
    for number in range(1, 6):  # of 10 s
        take_step(world, monitor)
        assert len(journal(tmp_path)) == number
        saved.append(len(Results.load(path).monitor) if path.exists() else 0)
    assert saved == [0, 2, 2, 4, 4]
    monitor.save()
    assert len(Results.load(path).monitor) == 5
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.slow
def test_a_resumed_run_goes_on_in_the_same_files(world: World, tmp_path: Path) -> None:
    with world.monitor(tmp_path, every=1) as monitor:
        for _ in range(4):
            take_step(world, monitor)
    time.sleep(1.0)  # TensorBoard reads its files in the order of their names, which have the second.
    with (tmp_path / "monitor.jsonl").open("a") as file:
        file.write('{"step": 5, "sec')  # the process died amid a line
    with world.monitor(tmp_path, every=1) as monitor:
        take_step(world, monitor, number=3)
    assert [event.step for event in board(tmp_path).Scalars("step/seconds")] == [1, 2, 3]
    assert [line["step"] for line in journal(tmp_path)] == [1, 2, 3]
    assert [record.step for record in Results.load(tmp_path / "monitor.json").monitor] == [1, 2, 3]


def test_tensorboard_has_means_over_the_steps_between(world: World, tmp_path: Path) -> None:
    with world.monitor(tmp_path, ceiling=1e12, every=2) as monitor:
        for seconds, flops in ((1, 4e12), (3, 4e12), (1, 1e12)):
            with monitor.step(tokens=8), monitor.phase("forward"):
                world.work(seconds, flops)
    events = board(tmp_path)
    rates = [(event.step, event.value) for event in events.Scalars("attention/tflops")]
    assert rates == [(2, 2.0), (3, 1.0)], "8 TFLOP in 4 s, not the mean of 4 and 4/3"
    # The second step, faster than the ceiling, raises it: no step stands above it.
    assert [event.value for event in events.Scalars("attention/share_of_ceiling")] == [0.5, 0.25]
    assert [event.value for event in events.Scalars("step/tokens_per_second")] == [4.0, 8.0]
    wanted = {
        "machine/utilisation",
        "phases/data",
        "phases/host",
        "phases/communication",
        "step/compile_seconds",
    }
    assert wanted <= set(events.Tags()["scalars"])


def test_losses_of_steps_and_of_held_out_data_are_kept_when_a_run_is_resumed(
    world: World, tmp_path: Path
) -> None:
    with world.monitor(tmp_path) as monitor:
        monitor.held_out(6.0)
        with monitor.step():
            world.work(1)
            loss = torch.tensor(5.0, requires_grad=True)
            monitor.loss(loss)
            loss.data += 1
        monitor.held_out(4.0)
        with monitor.step():  # cut off
            world.work(1)
            monitor.loss(0.0)
        monitor.held_out(0.0)
    with world.monitor(tmp_path) as resumed, resumed.step(number=2):
        world.work(1)
        resumed.loss(3.0)
    found = Results.load(tmp_path / "monitor.json")
    assert [record.loss for record in found.monitor] == [5.0, 3.0]
    assert found.evaluations == (Evaluation(0, 6.0), Evaluation(1, 4.0))


def test_losses_out_of_place_are_refused(world: World, tmp_path: Path) -> None:
    monitor = world.monitor(tmp_path)
    with pytest.raises(
        OptionError, match="loss: expected a loss within a step, got a loss outside of a step"
    ):
        monitor.loss(1.0)
    with monitor.step():
        world.work(1)
        with pytest.raises(OptionError, match="held_out: expected an open monitor between steps"):
            monitor.held_out(1.0)
    monitor.close()
    with pytest.raises(OptionError, match="got a closed monitor"):
        monitor.held_out(1.0)


def test_thinning_keeps_the_sums_and_bounds_the_number() -> None:
    thinned, seconds = Thinned(most=16), [1.0 + index % 7 for index in range(1000)]
    for step, length in enumerate(seconds, 1):
        shares = PhaseShares(forward=1.0) if step % 2 else PhaseShares(backward=1.0)
        known = {"attention_seconds": length / 2, "memory": step, "loss": float(step)}
        thinned.add(MonitorRecord(step, length, 10, shares, **known))
    records = thinned.all()
    assert len(records) <= 17
    assert sum(record.steps for record in records) == 1000
    assert len({record.steps for record in records[:-1]}) == 1, "old and new steps have the same resolution"
    assert records[-1].step == records[-1].memory == 1000
    total = sum(record.steps * record.seconds for record in records)
    assert total == pytest.approx(sum(seconds))
    assert sum(record.steps * (record.loss or 0) for record in records) == pytest.approx(1000 * 1001 / 2)
    forward = sum(record.steps * record.seconds * record.phases.forward for record in records)
    assert forward == pytest.approx(sum(seconds[::2]))
    assert all(record.attention_share == pytest.approx(0.5) for record in records)


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ("forward", r"phase: expected a phase within a step, got 'forward' outside"),
        ("step forwards", r"phase: expected forward or backward .* got 'forwards'"),
        ("step forward backward", r"phase: expected 'backward' outside .* got it within 'forward'"),
        ("step forward communication communication", r"got it within 'communication'"),
        ("step step", r"no step within another, got a step within step 1"),
        ("step forward data", r"data: expected a request for a batch outside .* got it within 'forward'"),
        ("zeroth", r"step: expected a number above 0, the last one, got 0"),
        ("close step", r"step: expected an open monitor, got a closed monitor"),
    ],
)
def test_misuse_is_named(calls: str, message: str, world: World, tmp_path: Path) -> None:
    monitor = world.monitor(tmp_path)
    places = {
        "step": monitor.step,
        "zeroth": lambda: monitor.step(number=0),
        "close": lambda: nullcontext(monitor.close()),
        "data": lambda: nullcontext(next(monitor.data([1]))),
    }

    def attempt() -> None:
        with ExitStack() as entered:
            for call in calls.split():
                entered.enter_context(places[call]() if call in places else monitor.phase(call))

    with pytest.raises(OptionError, match=message):
        attempt()


def test_impossible_options_are_refused(tmp_path: Path) -> None:
    for options, message in (
        ({"every": 0}, r"every: expected 1 or more, got 0"),
        ({"ceiling": 0.0}, r"ceiling: expected FLOP/s above 0"),
        ({"ceiling": float("nan")}, r"ceiling: .* got nan"),
        ({"device": "meta"}, r"device: expected cpu or cuda, got meta\. Pass your own probe"),
    ):
        with pytest.raises(OptionError, match=message):
            Monitor(tmp_path, **options)


def test_the_compiler_is_not_loaded_to_ask_for_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch._dynamo.utils", raising=False)
    assert probes.compile_seconds() == 0.0
    assert "torch._dynamo.utils" not in sys.modules


@pytest.mark.parametrize("has_nvml", [True, False])
def test_a_device_is_asked_for_its_utilisation_or_judged_by_its_phases(
    has_nvml: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    readings = iter([80, 80, 40])

    def utilization(_: torch.device) -> int:
        if not has_nvml:
            raise ModuleNotFoundError("pynvml")
        return next(readings)

    monkeypatch.setattr(torch.cuda, "utilization", utilization)
    probe = CudaProbe(torch.device("cuda", 0), period=2)
    probe.start()
    seen = [probe.utilisation(4.0, 3.0) for _ in range(3)]
    assert seen == ([0.8, 0.8, 0.4] if has_nvml else [0.75] * 3)
    assert ("NVML" in probe.utilisation_source) == has_nvml


def test_the_operators_count_visible_pairs_inside_compiled_graphs_too(tmp_path: Path) -> None:
    if probes.attention_totals() is None:
        pytest.skip("the kernel is not compiled")
    heads, length, dim = 2, 32, 16
    x = torch.randn(1, heads, length, dim, requires_grad=True)
    call = torch.compile(lambda x: attention(x, x, x, mask=causal()).sum(), backend="eager", fullgraph=True)
    with Monitor(tmp_path, ceiling=1e12) as monitor:
        for _ in range(2):
            with monitor.step():
                with monitor.phase("forward"):
                    loss = call(x)
                with monitor.phase("backward"):
                    loss.backward()
    torch._dynamo.reset()
    pairs = heads * length * (length + 1) / 2
    for record in monitor.results().monitor:
        assert record.attention_flops == (4 + 10) * pairs * dim
        assert 0 < record.attention_share < 1
        assert record.ceiling_share > 0
    assert monitor.results().monitor[0].compile_seconds > 0


def test_a_step_costs_a_small_part_of_one_percent(tmp_path: Path) -> None:
    """The reference job's step takes 75 ms. The best of several batches counts: a busy machine only adds."""
    allowed, steps = 0.01 * 0.075, 50
    with Monitor(tmp_path, ceiling=1e12) as monitor:

        def batch_seconds() -> float:
            start = time.perf_counter()
            for _ in range(steps):
                with monitor.step(tokens=2048):
                    for name in ("forward", "backward", "optimizer"):
                        with monitor.phase(name):
                            pass
            return (time.perf_counter() - start) / steps

        best = min(batch_seconds() for _ in range(10))
    assert best < allowed, f"{best * 1e6:.0f} us"
    assert 0 < monitor.overhead < 1


def test_the_example_of_the_documentation_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[3] / "docs" / "monitoring.md").read_text()
    example = page.split("```python\n")[1].split("```")[0]
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters())
    names = {"loader": [torch.ones(2, 4)] * 3, "model": model, "optimizer": optimizer}
    exec(compile(example, "docs/monitoring.md", "exec"), names)
    assert [record.tokens for record in Results.load(Path("runs/mine/monitor.json")).monitor] == [8, 8, 8]
    assert "Steps 1 to 3" in Path("runs/mine/monitor.html").read_text()


@pytest.mark.slow
def test_training_is_the_same_to_the_bit_whether_watched_or_not(tiny: Any, tmp_path: Path) -> None:
    config = tiny(steps=4, warmup=2, eval_bytes=64, checkpoint_every=2)

    def trained(name: str, observe: Any = None, **resume: Any) -> Any:
        folder, quiet = tmp_path / name, Console(file=io.StringIO())
        summary = train(config, folder, sample=0, observe=observe, console=quiet, **resume)
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return summary.bits_per_byte_end, [(line["loss"], line["grad_norm"]) for line in lines]

    folder = tmp_path / "watched"
    watched = partial(trained, "watched", lambda ceiling: Monitor(folder, ceiling=ceiling))
    assert watched() == trained("alone")
    assert not (tmp_path / "alone" / "monitor.json").exists()
    records, first = Results.load(folder / "monitor.json").monitor, journal(folder)
    assert [(record.step, record.tokens) for record in records] == [(step, 96) for step in range(1, 5)]
    for record in records:
        assert sum(astuple(record.phases)) == pytest.approx(1.0)
        assert min(astuple(record.phases)) >= 0
        # How large they are depends on what else the machine does.
        assert min(record.phases.forward, record.phases.backward, record.phases.optimizer) > 0
    watched(resume=True, from_step=2)
    again = journal(folder)
    assert [line["step"] for line in again] == [1, 2, 3, 4]
    assert again[:2] == first[:2]
    assert again[2]["seconds"] != first[2]["seconds"]

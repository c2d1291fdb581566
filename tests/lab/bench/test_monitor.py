"""The monitor: what it makes of marks and counters, what it leaves behind, and that it is no burden."""

from __future__ import annotations

import io
import json
import time
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import astuple
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from attnspan import causal
from attnspan.errors import OptionError
from attnspan.torch import attention
from attnspan_lab.bench.monitor import AttentionTotals, Monitor, monitor
from attnspan_lab.bench.monitor.log import Thinned
from attnspan_lab.bench.monitor.probes import CudaProbe, HostProbe, attention_totals
from attnspan_lab.bench.results import Evaluation, MonitorRecord, PhaseShares, Results
from train.train import train


class World(HostProbe):
    """Everything that a monitor reads, moved by hand: clock, counters, compiler, CPU time.

    A mark is known once the device has `finished` the work before it: at once, unless a test changes that.
    """

    def __init__(self):
        super().__init__(lambda: (self.now, self.cpu))
        self.now = self.cpu = self.compiling = 0.0
        self.totals = AttentionTotals(5.0, 100.0)
        self.finished, self.waits = float("inf"), []

    def mark(self):
        return self.now

    def known(self, mark):
        return mark <= self.finished

    def wait(self, mark):
        self.waits.append(mark)
        self.finished = max(self.finished, mark)

    def seconds(self, start, stop):
        assert max(start, stop) <= self.finished, "the device has not reached the mark"
        return stop - start

    def work(self, seconds, flops=0.0, compiling=0.0):
        """Let time pass, some of it in attention where there are FLOPs."""
        self.now += seconds
        self.cpu += seconds
        self.compiling += compiling
        if flops:
            self.totals = AttentionTotals(self.totals.seconds + seconds, self.totals.flops + flops)

    def batches(self, waits):
        for index, wait in enumerate(waits):
            self.now += wait  # waiting uses no core
            yield index


@pytest.fixture
def world(monkeypatch):
    made = World()
    monkeypatch.setattr(monitor, "time", SimpleNamespace(perf_counter=lambda: made.now))
    monkeypatch.setattr(monitor, "compile_seconds", lambda: made.compiling)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    return made


@pytest.fixture
def watch(world, tmp_path):
    """Make monitors of the world, which are closed in the end."""
    given = {"attention": lambda: world.totals, "probe": world}
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(Monitor(tmp_path, **given, **options))


def take_step(world, monitor, **options):
    """A step of 10 s: 1 host, 3 forward, 4 backward, 2 optimizer; attention 1 s forward, 2 s backward."""
    with monitor.step(tokens=50, **options):
        world.work(1)
        with monitor.phase("forward"):
            world.work(2)
            world.work(1, flops=4)
        with monitor.phase("backward"):
            world.work(2)
            world.work(2, flops=10)
        with monitor.phase("optimizer"):
            world.work(2)


def test_a_record_says_where_the_time_went_and_how_fast_attention_was(world, watch):
    monitor = watch(ceiling=14.0)
    world.work(100, flops=1000)  # time before the loop counts for nothing
    for _ in monitor.data(world.batches([10.0, 10.0])):
        take_step(world, monitor)
        # An evaluation between steps is the host's time, and no step's attention.
        world.work(5, flops=1000)
    first, second = monitor.results().monitor
    assert (first.step, first.seconds, first.tokens, first.tokens_per_second) == (1, 20.0, 50, 2.5)
    assert astuple(first.phases) == pytest.approx((0.5, 0.05, 0.15, 0.2, 0.1, 0.0))
    assert (second.seconds, second.phases.host) == (25.0, pytest.approx(6 / 25))
    for record in (first, second):
        assert sum(astuple(record.phases)) == pytest.approx(1.0)
        assert (record.attention_seconds, record.attention_flops) == (3.0, 14.0)
        assert record.attention_flops_per_second == pytest.approx(14 / 3)
        assert record.ceiling_share == pytest.approx(1 / 3)
    # Of the first step's 20 s on two threads, one thread worked for 10.
    assert first.utilisation == 0.25
    assert first.memory is None or first.memory > 2**20


def _compile(world, monitor):
    with monitor.phase("forward"):
        world.work(10, compiling=7)


def _communicate(world, monitor):
    with monitor.phase("backward"):
        world.work(4)
        with monitor.phase("communication"):
            world.work(2, compiling=1)
    with monitor.phase("communication"):
        world.work(4)


def _await_data_between(world, monitor):
    for _ in monitor.data(world.batches([1.0, 1.0])):
        with monitor.phase("forward"):
            world.work(4)


def _wait_behind_queued_work(world, monitor):
    # The device is busy from the end of one step to the end of the next, although the host waited 6 s.
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
def test_shares_of_a_step(world, watch, step, compiled, shares):
    with (monitor := watch()).step():
        step(world, monitor)
    record = monitor.results().monitor[0]
    assert record.compile_seconds == compiled
    assert astuple(record.phases) == pytest.approx(astuple(shares))


def test_nothing_waits_for_an_asynchronous_device_before_the_end(world, watch):
    world.finished, monitor = 0.0, watch()
    for finished in (0.0, 5.0, 20.0, 30.0):
        world.finished = max(world.finished, finished)
        take_step(world, monitor)
    # At the end of the fourth step the device was past the third one's end.
    assert (world.waits, [record.step for record in monitor.results().monitor]) == ([], [1, 2, 3])
    monitor.close()
    assert world.waits == [40.0], "one wait, for the last mark"
    assert [record.seconds for record in monitor.results().monitor] == [10.0] * 4


def journal(folder):
    """The records of steps; held-out losses have lines of their own."""
    lines = [json.loads(line) for line in (folder / "monitor.jsonl").read_text().splitlines()]
    return [line for line in lines if "held_out" not in line]


def scalars(folder, tag):
    events = EventAccumulator(str(folder / "tensorboard" / "monitor")).Reload()
    return [(x.step, x.value) for x in events.Scalars(tag)] if tag in events.Tags()["scalars"] else []


def test_a_step_that_raises_is_left_out_and_loses_no_other(world, watch, tmp_path):
    monitor = watch(save_seconds=0.0)
    take_step(world, monitor)
    saved = Results.load(tmp_path / "monitor.json").monitor
    assert (len(journal(tmp_path)), len(saved)) == (1, 1), "at once, and when it is due"
    with suppress(RuntimeError), monitor.step(), monitor.phase("forward"):
        world.work(3)
        raise RuntimeError("a bad batch")
    take_step(world, monitor, number=2)  # The loop may go on.
    monitor.close()
    assert [line["step"] for line in journal(tmp_path)] == [1, 2]
    first, second = Results.load(tmp_path / "monitor.json").monitor
    assert (first.seconds, second.seconds, second.phases.host) == (10.0, 13.0, 4 / 13)
    assert [step for step, _ in scalars(tmp_path, "phases/forward")] == [2]


@pytest.mark.slow
def test_a_resumed_run_goes_on_in_the_same_files(world, watch, tmp_path):
    monitor = watch(every=1)
    monitor.held_out(6.0)
    for loss in (torch.tensor(5.0, requires_grad=True), 4.0, 0.0):
        with monitor.step():
            world.work(1)
            monitor.loss(loss)
        monitor.held_out(7.0)
    monitor.close()
    time.sleep(1.0)  # TensorBoard reads its files in the order of their names, which have the second.
    with (tmp_path / "monitor.jsonl").open("a") as file:
        file.write('{"step": 5, "sec')  # the process died amid a line
    resumed = watch(every=1)
    with resumed.step(number=3):
        world.work(1)
        resumed.loss(3.0)
    resumed.close()
    assert [line["step"] for line in journal(tmp_path)] == [1, 2, 3]
    assert [step for step, _ in scalars(tmp_path, "step/seconds")] == [1, 2, 3]
    found = Results.load(tmp_path / "monitor.json")
    assert [record.loss for record in found.monitor] == [5.0, 4.0, 3.0]
    assert found.evaluations == (Evaluation(0, 6.0), Evaluation(1, 7.0), Evaluation(2, 7.0))


def test_tensorboard_has_means_over_the_steps_between(world, watch, tmp_path):
    monitor = watch(ceiling=1e12, every=2)
    for seconds, flops in ((1, 4e12), (3, 4e12), (1, 1e12)):
        with monitor.step(tokens=8), monitor.phase("forward"):
            world.work(seconds, flops)
    monitor.close()
    # 8 TFLOP in 4 s, not the mean of 4 and 4/3.
    assert scalars(tmp_path, "attention/tflops") == [(2, 2.0), (3, 1.0)]
    # The second step, faster than the ceiling, raises it: no step stands above it.
    assert scalars(tmp_path, "attention/share_of_ceiling") == [(2, 0.5), (3, 0.25)]
    assert scalars(tmp_path, "step/tokens_per_second") == [(2, 4.0), (3, 8.0)]
    for tag in ("machine/utilisation", "phases/data", "phases/communication", "step/compile_seconds"):
        assert scalars(tmp_path, tag), tag


def test_thinning_keeps_the_sums_and_bounds_the_number():
    thinned, seconds = Thinned(most=16), [1.0 + index % 7 for index in range(1000)]
    for step, length in enumerate(seconds, 1):
        shares = PhaseShares(forward=1.0) if step % 2 else PhaseShares(backward=1.0)
        known = {"attention_seconds": length / 2, "memory": step, "loss": float(step)}
        thinned.add(MonitorRecord(step, length, 10, shares, **known))
    records = thinned.all()
    assert len(records) <= 17
    assert len({record.steps for record in records[:-1]}) == 1, "old and new steps have the same resolution"
    assert records[-1].step == records[-1].memory == sum(record.steps for record in records) == 1000
    sums = [(x.steps * x.seconds, x.steps * x.loss, x.steps * x.seconds * x.phases.forward) for x in records]
    wanted = sum(seconds), 1000 * 1001 / 2, sum(seconds[::2])
    assert [sum(x) for x in zip(*sums, strict=True)] == pytest.approx(wanted)
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
        ("loss", r"loss: expected a loss within a step, got a loss outside of a step"),
        ("step held_out", r"held_out: expected an open monitor between steps"),
        ("close held_out", r"got a closed monitor"),
        ({"every": 0}, r"every: expected 1 or more, got 0"),
        ({"ceiling": 0.0}, r"ceiling: expected FLOP/s above 0"),
        ({"ceiling": float("nan")}, r"ceiling: .* got nan"),
        ({"device": "meta", "probe": None}, r"device: expected cpu or cuda, got meta\. Pass your own probe"),
    ],
)
def test_misuse_is_named(calls, message, tmp_path):
    def attempt(entered):
        monitor = entered.enter_context(Monitor(tmp_path, **(calls if isinstance(calls, dict) else {})))
        places = {
            "step": monitor.step,
            "zeroth": lambda: monitor.step(number=0),
            "close": lambda: nullcontext(monitor.close()),
            "data": lambda: nullcontext(next(monitor.data([1]))),
            "loss": lambda: nullcontext(monitor.loss(1.0)),
            "held_out": lambda: nullcontext(monitor.held_out(1.0)),
        }
        for call in calls.split():
            entered.enter_context(places[call]() if call in places else monitor.phase(call))

    with pytest.raises(OptionError, match=message), ExitStack() as entered:
        attempt(entered)


@pytest.mark.parametrize("has_nvml", [True, False])
def test_a_device_is_asked_for_its_utilisation_or_judged_by_its_phases(has_nvml, monkeypatch):
    readings = iter([80, 80, 40])

    def utilization(_):
        if not has_nvml:
            raise ModuleNotFoundError("pynvml")
        return next(readings)

    monkeypatch.setattr(torch.cuda, "utilization", utilization)
    probe = CudaProbe(torch.device("cuda", 0), period=2)
    seen = [probe.utilisation(4.0, 3.0) for _ in range(3)]
    assert seen == ([0.8, 0.8, 0.4] if has_nvml else [0.75] * 3)
    assert ("NVML" in probe.utilisation_source) == has_nvml


@pytest.mark.slow
def test_the_operators_count_visible_pairs_inside_compiled_graphs_too(tmp_path):
    heads, length, dim = 2, 32, 16
    x = torch.randn(1, heads, length, dim, requires_grad=True)
    call = torch.compile(lambda x: attention(x, x, x, mask=causal()).sum(), backend="eager", fullgraph=True)
    with Monitor(tmp_path, ceiling=1e12) as monitor:
        for _ in range(2):
            with monitor.step():
                call(x).backward()
    torch._dynamo.reset()
    assert monitor.results().monitor[0].compile_seconds > 0
    for record in monitor.results().monitor if attention_totals() is not None else ():
        assert record.attention_flops == (4 + 10) * heads * length * (length + 1) / 2 * dim
        assert 0 < record.attention_share < 1
        assert record.ceiling_share > 0
    # Without counters there are no figures of attention.
    with Monitor(tmp_path / "without", attention=lambda: None) as monitor, monitor.step():
        pass
    assert monitor.results().monitor[0].attention_flops_per_second is None
    assert not scalars(tmp_path / "without", "attention/tflops")


def test_a_step_costs_a_small_part_of_one_percent(tmp_path):
    """The reference job's step takes 75 ms. The best of several batches counts: a busy machine only adds."""
    steps, seconds = 50, []
    with Monitor(tmp_path, ceiling=1e12) as monitor:
        for _ in range(10):
            start = time.perf_counter()
            for _ in range(steps):
                with monitor.step(tokens=2048):
                    for name in ("forward", "backward", "optimizer"):
                        with monitor.phase(name):
                            pass
            seconds.append((time.perf_counter() - start) / steps)
    assert min(seconds) < 0.01 * 0.075, seconds
    assert 0 < monitor.overhead < 1


def test_the_example_of_the_documentation_runs(tmp_path, monkeypatch):
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
def test_training_is_the_same_to_the_bit_whether_watched_or_not(tiny, tmp_path):
    config = tiny(steps=4, warmup=2, eval_bytes=64, checkpoint_every=2)

    def trained(name, observe=None, **resume):
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
        # How large they are depends on what else the machine does.
        assert min(record.phases.forward, record.phases.backward, record.phases.optimizer) > 0
    watched(resume=True, from_step=2)
    again = journal(folder)
    assert [line["step"] for line in again] == [1, 2, 3, 4]
    assert again[:2] == first[:2]
    assert again[2]["seconds"] != first[2]["seconds"]

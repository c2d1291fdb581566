"""A training run from options to summary: start or resume, training loop, and end."""

from __future__ import annotations

import math
import os
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from torch.profiler import profile, schedule, tensorboard_trace_handler

from attnspan.errors import OptionError
from attnspan_lab.files import to_plain, write_json, write_whole
from train.checkpoint import CheckpointStore
from train.config import CheckpointError, ConfigError, DataError, TrainConfig
from train.data import Batches, settle_strategy
from train.documents import Data, Vocabulary, load_data, load_vocabulary
from train.parallelize import Ranks, faster_dtype, open_ranks, peak_flops
from train.progress import Graphs, Reporter, Summary
from train.sample import continue_text
from train.step import UNOBSERVED, Stepper, StepResult
from train.stop import Stop, Stopped

__all__ = ["Run", "train"]

_CONFIG, _SUMMARY = "config.json", "summary.json"
_JOB = "job"  # File with the torchrun job that opened the run last.

# Time that --minutes reserves for the last checkpoint, text and the monitor's page, besides the score.
_RESERVE_SECONDS = 8.0
_TRIAL_SECONDS, _TRIALS = 3.0, 4

#: Makes the observer of the steps (`Unobserved`) from this rank's ceiling in FLOP/s, or None.
Observe = Callable[[float | None], AbstractContextManager[Any]]


@dataclass
class Run:
    """State that lives as long as a run."""

    config: TrainConfig  # with the values that are decided at start-up
    folder: Path
    vocabulary: Vocabulary
    data: Data
    stepper: Stepper
    store: CheckpointStore
    ranks: Ranks
    done: int = 0  # number of steps taken
    place: dict[str, int] | None = None  # position in the data; None is the beginning
    start_score: float = float("nan")  # held-out bits per byte before training
    doing: str = "compiling"  # current common action of the ranks, for messages

    def __post_init__(self) -> None:
        self.stop = Stop(self.ranks)

    def batches(self, steps: int) -> Batches:
        """Load the batches of the next steps."""
        return Batches(self.config, self.data.train, self.ranks.number, steps, self.place)

    def save(self) -> None:
        """Start to write a checkpoint of the current state."""
        progress = {"place": self.place, "digests": self.data.digests, "start_score": self.start_score}
        self.store.save(self.done, {"state": self.stepper}, progress)

    def load(self, step: int | None) -> None:
        """Return to a checkpoint, by default the latest.

        A checkpoint with other data raises a CheckpointError.
        """
        self.done, progress = self.store.load({"state": self.stepper}, step)
        self.ranks.first(lambda: self._go_back(progress.get("digests", {})))
        self.place, self.start_score = progress["place"], progress["start_score"]

    def _go_back(self, digests: dict[str, str]) -> None:
        steps, remedy = self.config.steps, "Pass a larger --steps, or go back with --from-step"
        wanted = f"--steps of at least {self.done}, the number of steps already taken"
        ConfigError.unless(steps == 0 or steps >= self.done, wanted, steps, remedy)
        for part, digest in self.data.digests.items():
            wanted = f"the {part} documents that {self.folder} was trained with, sha256 {digests.get(part)}"
            remedy = "Restore the original data and tokenizer, or start a new run with another --name"
            same = digest == digests.get(part)
            CheckpointError.unless(same, wanted, f"{digest} from {self.data.source}", remedy)
        self.store.go_back(self.done)


def train(
    config: TrainConfig,
    folder: Path,
    *,
    resume: bool = False,
    from_step: int | None = None,
    sample: int = 200,
    ranks: Ranks | None = None,
    observe: Observe | None = None,
    console: Console | None = None,
) -> Summary:
    """Train a model. At the end, print and save the results.

    All ranks call this function. The first rank prints and writes. After a restart by torchrun, the ranks
    continue from the latest checkpoint of their own job, if there is one, and ignore ``resume`` and
    ``from_step``. Errors are subclasses of `JobError` that name the option to change. After Ctrl-C or
    SIGTERM, the step ends and is saved, and `Stopped` is raised. A second signal raises a KeyboardInterrupt.

    Args:
        config: Options. When resuming, the run's own options, possibly with changes by `TrainConfig.moved`.
        folder: The run's folder, which must be visible to ranks on all machines.
        resume: Resume from the checkpoint ``from_step``, or else from the latest.
        from_step: Step of the checkpoint to resume from.
        sample: Bytes of text to sample at the end.
        ranks: Ranks of the job. Default: from the launcher or the existing process group (`open_ranks`).
        observe: Makes the observer of the steps, a context manager around them.
        console: Console to print to. Default: standard output.
    """
    began = time.perf_counter()
    with nullcontext(ranks) if ranks is not None else open_ranks(config) as ranks:
        console = (console or Console()) if ranks.is_first else Console(quiet=True)
        with ranks.joined(lambda: "the start"):
            run = _open(config, folder, ranks, resume, from_step)
        with ranks.joined(lambda: run.doing), _interruptible(run, console):
            found = _train(run, console, began, observe, sample)
            summary = ranks.first(lambda: found)  # Only the first rank has the whole run.
        if ranks.is_first:
            write_json(folder / _SUMMARY, {**to_plain(summary), "mfu": summary.mfu}, indent=2)
        summary.show(console)
        _suggest(run, console)
        return summary


@contextmanager
def _interruptible(run: Run, console: Console) -> Iterator[None]:
    """Print how to resume after an interruption, either after a step or immediately."""
    resume = f"resume with python examples/train --resume {_named(run)}"
    try:
        with run.stop.listening():
            yield
    except Stopped:
        _say(console, "stop", f"after step {run.done}, which is saved: {resume}")
        raise
    except KeyboardInterrupt:
        steps, anew = run.store.steps(), f"nothing is saved: start {run.folder} again"
        _say(console, "stop", "immediately, " + (f"step {steps[-1]} is saved: {resume}" if steps else anew))
        raise


def _open(config: TrainConfig, folder: Path, ranks: Ranks, resume: bool, from_step: int | None) -> Run:
    """Read the data, build the model, load a checkpoint, and decide all options that are still open."""
    torch.set_num_threads(config.threads or ranks.first(torch.get_num_threads))
    dtype = ranks.first(lambda: faster_dtype(ranks.device)) if config.dtype == "auto" else config.dtype
    config = replace(config, threads=torch.get_num_threads(), dtype=dtype)
    store = CheckpointStore(folder / "checkpoints", ranks)
    if ranks.first(lambda: _opened_before(folder)):
        resume, from_step = ranks.first(lambda: bool(store.steps())), None
    got, remedy = f"{folder}, which holds one", "Pass --resume, or another --name"
    ranks.first(lambda: ConfigError.unless(resume or not store.steps(), "a new run", got, remedy))
    vocabulary, data = ranks.together(lambda: _read(config))
    expected = ranks.first(lambda: data.digests)
    ranks.together(lambda: _refuse_other_data(data, expected))
    config = settle_strategy(config, data.train)
    run = Run(config, folder, vocabulary, data, Stepper(config, vocabulary.end + 1, ranks), store, ranks)
    if resume:
        run.load(from_step)
    # Create the folder only now, so that unreadable data leave no empty folder.
    ranks.first(lambda: _keep(config, folder))
    return run


def _read(config: TrainConfig) -> tuple[Vocabulary, Data]:
    vocabulary = load_vocabulary(config.tokenizer)
    return vocabulary, load_data(config, vocabulary)


def _refuse_other_data(data: Data, expected: dict[str, str]) -> None:
    for part, digest in data.digests.items():
        wanted = f"the same {part} documents on all ranks, sha256 {expected[part]} as on the first"
        remedy = "Use the same files on all ranks with --data"
        DataError.unless(digest == expected[part], wanted, f"{digest} from {data.source}", remedy)


def _opened_before(folder: Path) -> bool:
    """Whether this job opened the run before torchrun restarted it. Otherwise the run is not its own."""
    mark, job = folder / _JOB, os.environ.get("TORCHELASTIC_RUN_ID")
    ours = job is not None and mark.is_file() and mark.read_text() == job
    if ours and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        mark.unlink()  # The file may come from an earlier job with the same name: --rdzv-id may repeat.
        return False
    return ours


def _keep(config: TrainConfig, folder: Path) -> None:
    """Write the current options of a run."""
    try:
        write_json(folder / _CONFIG, config, indent=2)
        if (job := os.environ.get("TORCHELASTIC_RUN_ID")) is not None:
            write_whole(folder / _JOB, job)
        if config.profile:
            Path(config.profile).mkdir(parents=True, exist_ok=True)
    except (OSError, OptionError) as error:
        wanted, remedy = "folders that can be written", "Choose other folders with --runs-dir and --profile"
        raise ConfigError.of(wanted, error, remedy) from None


def _train(run: Run, console: Console, began: float, observe: Observe | None, sample: int) -> Summary:
    """Run everything from the first compilation to the text of the trained model."""
    ranks, stepper, device = run.ranks, run.stepper, run.ranks.device
    _introduce(run, console)
    bursts, before = peak_flops(run.config, device), Graphs.since()
    compile_seconds = stepper.warm_up(next(iter(run.batches(1))))
    score_began = time.perf_counter()
    if not run.done:
        run.start_score = stepper.bits_per_byte(run.data.held_out)
    if not run.config.steps:
        _choose_steps(run, console, began, time.perf_counter() - score_began)
    warm, so_far = Graphs.since(*before), Graphs.since()
    with observe(max(bursts) or None) if observe else nullcontext(UNOBSERVED) as observer:
        if not run.done:
            observer.held_out(run.data.held_out.nats_per_target(run.start_score))
        results = _loop(run, console, observer)
        [memory] = ranks.sum([float(ranks.peak_memory())])
        run.doing = "the held-out score"
        score = stepper.bits_per_byte(run.data.held_out)
        if results:
            observer.held_out(run.data.held_out.nats_per_target(score))
    bursts += peak_flops(run.config, device)
    run.doing = "sampling"
    text = _sample(run, sample)
    # A run that is resumed at its end takes no step.
    speeds = [each["gflops"] * 1e9 for each in results] or [0.0]
    return Summary(
        bits_per_byte_start=run.start_score,
        bits_per_byte_end=score,
        steps=run.config.steps,
        tokens_per_second=median([each["tokens_per_second"] for each in results] or [0.0]),
        flops_per_second=median(speeds),
        fastest=max(speeds),
        ceiling=ranks.sum(bursts),
        compile_seconds=compile_seconds,
        warm=warm if run.config.compile else None,
        later=Graphs.since(*so_far) if run.config.compile else None,
        peak_memory=memory,
        seconds=time.perf_counter() - began,
        ranks=_in_words(run.config),
        text=text,
    )


def _choose_steps(run: Run, console: Console, began: float, score_seconds: float) -> None:
    """Time a few steps without updates, and choose the number of steps that fits into the run's time."""
    trials: list[float] = []
    while run.ranks.first(lambda t=trials: sum(t) < _TRIAL_SECONDS):  # type: ignore[misc]
        trials += [run.stepper.warm_up(batch) for batch in run.batches(_TRIALS)]
    left = run.config.minutes * 60 - (time.perf_counter() - began) - score_seconds - _RESERVE_SECONDS
    steps = run.done + run.ranks.first(lambda: max(1, int(left / mean(trials))))
    run.config = replace(run.config, steps=steps, warmup=min(run.config.warmup, steps // 10))
    run.stepper.config = run.config
    run.ranks.first(lambda: write_json(run.folder / _CONFIG, run.config, indent=2))
    _say(console, "time", f"{run.config.minutes:g} minutes are {steps:,} steps of {mean(trials):.2f} s")


def _loop(run: Run, console: Console, observer: Any) -> list[dict[str, float]]:
    """Run the remaining steps, and return the measurements of each."""
    config, results = run.config, []
    with ExitStack() as stack:
        stack.enter_context(run.stop.patient())
        profiler = stack.enter_context(_profiler(config, run.ranks.number)) if config.profile else None
        reporter = Reporter(console, run.folder, run.done, config.steps) if run.ranks.is_first else None
        if reporter:
            stack.callback(reporter.close)
            reporter.board.add_scalar("held_out/bits_per_byte", run.start_score, 0)
        for batch in observer.data(run.batches(config.steps - run.done).loader()):
            run.doing = f"step {run.done + 1}"
            with observer.step(number=run.done + 1, tokens=round(batch.tokens * config.world)):
                result = run.stepper.step(batch, run.done, observer)
                observer.loss(result.loss)
            run.done, run.place = run.done + 1, batch.place
            _refuse_divergence(run, result)
            results.append({"step": run.done} | result.figures())
            if reporter:
                reporter.update(results[-1])
            if profiler:
                profiler.step()
            due = config.checkpoint_every and run.done % config.checkpoint_every == 0
            stopped = run.stop.agreed()
            if due or stopped or run.done == config.steps:
                run.doing = f"the checkpoint of step {run.done}"
                run.save()
            if stopped:
                break
        run.store.wait()
        if stopped := run.stop.agreed():
            raise stopped
    return results


def _refuse_divergence(run: Run, result: StepResult) -> None:
    """Stop before non-finite weights replace a good checkpoint. All ranks have the same values."""
    if math.isfinite(result.loss + result.grad_norm):
        return
    run.store.wait()
    wanted = f"a finite loss and gradient norm at step {run.done}"
    got = f"{result.loss} and {result.grad_norm} at the learning rate {result.lr:.3g}"
    remedy = "Start a new run with a lower --lr or a longer --warmup. Earlier checkpoints are unchanged"
    run.ranks.first(lambda: ConfigError.unless(False, wanted, got, remedy))


def _profiler(config: TrainConfig, rank: int) -> profile:
    """Trace three steps after the first two into one file per rank, for Perfetto or TensorBoard."""
    # Silence the profiler's log on stderr. The variable is read at first use.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    write = tensorboard_trace_handler(str(config.profile), worker_name=f"rank{rank}")
    return profile(schedule=schedule(wait=1, warmup=1, active=3, repeat=1), on_trace_ready=write)


def _sample(run: Run, size: int) -> str:
    """Sample text of one document from the model, with at most ``size`` tokens."""
    prompt = "def " if run.config.data is None else ""
    how = run.stepper.model, run.vocabulary, prompt, size, 0.8, run.config.seed, run.ranks
    return prompt + "".join(continue_text(*how)) if size else ""


def _say(console: Console, name: str, text: str) -> None:
    console.print(f"[bold]{name:>6}[/bold]  {escape(text)}", soft_wrap=True, highlight=False)


def _introduce(run: Run, console: Console) -> None:
    config, data, kind = run.config, run.data, run.ranks.device.type
    size = f"{len(data.train):,} documents, {decimal(data.train.num_bytes)}, {len(data.held_out)} held out"
    weights = sum(parameter.numel() for parameter in run.stepper.model.parameters())
    shape = f"{config.layers} blocks, {config.heads} heads on {config.kv_heads}, rows of {config.seq_len:,}"
    where = f"{config.threads} threads{' of each rank' * (config.world > 1)}" if kind == "cpu" else kind
    _say(console, "data", f"{data.source}: {size}")
    _say(console, "model", f"{weights / 1e6:.2f} M parameters, {shape}")
    _say(console, "how", f"{config.attention} attention, {config.dtype}, {where}, {_in_words(config)}")
    _say(console, "run", str(run.folder) + (f", resumed at step {run.done}" if run.done else ""))
    _say(console, "", f"{'compiling, ' * config.compile}scoring{', timing steps' * (not config.steps)} ...")


def _in_words(config: TrainConfig) -> str:
    if config.world == 1:
        return "1 rank"
    shared = f", {config.strategy}" if config.cp > 1 else ""
    return f"{config.world} ranks: cp {config.cp}{shared}, dp {config.dp}{', sharded' * config.fsdp}"


def _named(run: Run) -> str:
    """Return the options that name a run."""
    runs, name = shlex.quote(str(run.folder.parent)), shlex.quote(run.folder.name)
    return f"--name {name}" if runs == "runs" else f"--runs-dir {runs} --name {name}"


def _suggest(run: Run, console: Console) -> None:
    """Suggest what to try next."""
    config = run.config
    _say(
        console,
        "next",
        f'python examples/train/sample.py {shlex.quote(str(run.folder))} "import "   more text of this model',
    )
    _say(console, "", f"python examples/train --resume {_named(run)} --steps {2 * config.steps}   train on")
    if config.world == 1:
        _say(console, "", "python examples/train --cp 2   two ranks share each row; --fsdp shards the model")
    if config.data is None:
        _say(console, "", "python examples/train --data FOLDER   your own text, .jsonl or .parquet")

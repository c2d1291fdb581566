"""A training run from options to summary: start or resume, training loop, and end."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from typing import Any

from rich.console import Console
from torch.profiler import profile, schedule, tensorboard_trace_handler

from attnspan_lab.files import to_plain, write_json
from train.config import ConfigError, TrainConfig
from train.parallelize import Ranks, open_ranks, peak_flops
from train.progress import Summary, graph_counts, in_words, introduce, reporter, say, suggest
from train.run import Run, open_run
from train.sample import continue_text
from train.step import UNOBSERVED, StepResult
from train.stop import Stopped

__all__ = ["train"]

# Time that --minutes reserves for the last checkpoint, text and the monitor's page, besides the score.
_RESERVE_SECONDS = 8.0
_TRIAL_SECONDS, _TRIALS = 3.0, 4

#: Makes the observer of the steps (`Unobserved`) from this rank's ceiling in FLOP/s, or None.
Observe = Callable[[float | None], AbstractContextManager[Any]]


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
            run = open_run(config, folder, ranks, resume, from_step)
        with ranks.joined(lambda: run.doing), _interruptible(run, console):
            found = _train(run, console, began, observe, sample)
            summary = ranks.first(lambda: found)  # Only the first rank has the whole run.
        if ranks.is_first:
            write_json(folder / "summary.json", {**to_plain(summary), "mfu": summary.mfu}, indent=2)
        summary.show(console)
        suggest(run, console)
        return summary


@contextmanager
def _interruptible(run: Run, console: Console) -> Iterator[None]:
    """Print how to resume after an interruption, either after a step or immediately."""
    resume = f"is saved: resume with python examples/train --resume {run.named}"
    try:
        with run.stop.listening():
            yield
    except Stopped:
        say(console, "stop", f"after step {run.done}, which {resume}")
        raise
    except KeyboardInterrupt:
        steps, anew = run.store.steps(), f"nothing is saved: start {run.folder} again"
        say(console, "stop", "immediately, " + (f"step {steps[-1]} {resume}" if steps else anew))
        raise


def _train(run: Run, console: Console, began: float, observe: Observe | None, sample: int) -> Summary:
    """Run everything from the first compilation to the text of the trained model."""
    stepper, held_out = run.stepper, run.data.held_out
    introduce(run, console)
    bursts, before = peak_flops(run.config, run.ranks.device), graph_counts()
    compile_seconds = stepper.warm_up(next(iter(run.batches(1))))
    score_began = time.perf_counter()
    if not run.done:
        run.start_score = stepper.bits_per_byte(held_out)
    if not run.config.steps:
        _choose_steps(run, console, began, time.perf_counter() - score_began)
    warm = graph_counts()
    with observe(max(bursts) or None) if observe else nullcontext(UNOBSERVED) as observer:
        if not run.done:
            observer.held_out(held_out.nats_per_target(run.start_score))
        run.stop.patient = True
        results = _loop(run, console, observer)
        run.stop.patient = False
        [memory] = run.ranks.sum([float(run.ranks.peak_memory())])
        run.doing = "the held-out score"
        score = stepper.bits_per_byte(held_out)
        if results:
            observer.held_out(held_out.nats_per_target(score))
    bursts += peak_flops(run.config, run.ranks.device)
    run.doing = "sampling"
    # A run that is resumed at its end takes no step.
    speeds = [each["gflops"] * 1e9 for each in results] or [0.0]
    return Summary(
        bits_per_byte_start=run.start_score,
        bits_per_byte_end=score,
        steps=run.config.steps,
        tokens_per_second=median([each["tokens_per_second"] for each in results] or [0.0]),
        flops_per_second=median(speeds),
        fastest=max(speeds),
        ceiling=run.ranks.sum(bursts),
        compile_seconds=compile_seconds,
        graphs=warm[0] - before[0] if run.config.compile else None,
        breaks=graph_counts()[1] - before[1],
        recompiles=graph_counts()[0] - warm[0],
        peak_memory=memory,
        text=_sample(run, sample),
        seconds=time.perf_counter() - began,
        ranks=in_words(run.config),
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
    run.ranks.first(run.write_config)
    say(console, "time", f"{run.config.minutes:g} minutes are {steps:,} steps of {mean(trials):.2f} s")


def _loop(run: Run, console: Console, observer: Any) -> list[dict[str, float]]:
    """Run the remaining steps, and return the measurements of each."""
    config, results = run.config, list[dict[str, float]]()
    with _profiler(run) as profiler, reporter(console, run) as report:
        for batch in observer.data(run.batches(config.steps - run.done).loader()):
            run.doing = f"step {run.done + 1}"
            with observer.step(number=run.done + 1, tokens=round(batch.tokens * config.world)):
                result = run.stepper.step(batch, run.done, observer)
                observer.loss(result.loss)
            run.done, run.place = run.done + 1, batch.place
            _refuse_divergence(run, result)
            results.append({"step": run.done, **result._asdict()})
            report(results[-1])
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


def _profiler(run: Run) -> AbstractContextManager[profile | None]:
    """Trace three steps after the first two into one file per rank, for Perfetto or TensorBoard."""
    if not run.config.profile:
        return nullcontext()
    # Silence the profiler's log on stderr. The variable is read at first use.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    write = tensorboard_trace_handler(run.config.profile, worker_name=f"rank{run.ranks.number}")
    return profile(schedule=schedule(wait=1, warmup=1, active=3, repeat=1), on_trace_ready=write)


def _sample(run: Run, size: int) -> str:
    """Sample text of one document from the model, with at most ``size`` tokens."""
    prompt = "def " if run.config.data is None else ""
    how = run.stepper.model, run.vocabulary, prompt, size, 0.8, run.config.seed, run.ranks
    return prompt + "".join(continue_text(*how)) if size else ""

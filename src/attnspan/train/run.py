"""A training run from its options to its summary."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.filesize import decimal

from attnspan.train.checkpoint import CheckpointStore
from attnspan.train.config import TrainConfig
from attnspan.train.errors import CheckpointError, ConfigError
from attnspan.train.hooks import UNOBSERVED, Observer
from attnspan.train.job import Run
from attnspan.train.machine import faster_dtype, matmul_ceiling, peak_memory
from attnspan.train.measure import Comparison, Graphs, attention_share, compare
from attnspan.train.packing import Batch
from attnspan.train.parity import Parity, check_parity, compare_ranks, one_rank
from attnspan.train.progress import Reporter, metrics
from attnspan.train.ranks import Ranks, job_id, open_ranks, restarted
from attnspan.train.summary import Summary

__all__ = ["resume_config", "train"]

_CONFIG = "config.json"
_SUMMARY = "summary.json"
_JOB = "job"  # Which job of torchrun has opened the run last.
_PROFILED_STEPS = 3
_COMPARED_STEPS = 5
_REPEATED_STEPS = 5


def resume_config(folder: Path) -> TrainConfig:
    """The options that a run was started with.

    Args:
        folder: The run's folder.

    Raises:
        CheckpointError: There is no such run.

    Example:
        >>> resume_config(Path("/none"))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        attnspan.train.errors.CheckpointError: checkpoint: expected a run to resume in /none, got nothing ...
    """
    path = folder / _CONFIG
    if not path.is_file():
        raise CheckpointError(
            expected=f"a run to resume in {folder}",
            got="nothing there",
            remedy="give its name with --name, or start it without --resume",
        )
    return TrainConfig.load(path)


def train(
    config: TrainConfig,
    folder: Path,
    *,
    resume: bool = False,
    from_step: int | None = None,
    against_sdpa: bool = True,
    against_one_rank: bool = True,
    ranks: Ranks | None = None,
    observe: Callable[[float], AbstractContextManager[Observer]] | None = None,
    console: Console | None = None,
) -> Summary:
    """Train a model; at the end print and save what came of it.

    With several ranks each of them calls this; the first one prints and writes. After a restart by torchrun
    they go on from the latest checkpoint of their own job, if there is one, whatever ``resume`` and
    ``from_step`` say. The summary is saved before the comparisons at the end, and again with them.

    Args:
        config: Options. When resuming, those of the run itself (`resume_config`), on other ranks if need be
            (`TrainConfig.on_ranks`).
        folder: The run's folder, for checkpoints, metrics, TensorBoard events and ``summary.json``; ranks on
            several machines all see it.
        resume: Go on from a checkpoint.
        from_step: Which checkpoint to resume from; None takes the latest.
        against_sdpa: Time some steps against SDPA at the end; with several ranks, against one rank too.
        against_one_rank: With several ranks, repeat the first steps on one at the end, and compare losses.
        ranks: Who runs it; by default whom the launcher or the present process group names (`open_ranks`).
        observe: Makes the observer of the steps, from the measured ceiling in FLOP/s; it is open during them.
        console: Where people read; standard output by default.

    Returns:
        The figures of the run.

    Raises:
        ConfigError: The folder already holds a run, and it is not to be resumed.
        DataError: The data cannot be read.
        CheckpointError: There is nothing to resume from, or it is damaged.
        RankError: A rank ended, or did not answer in time.

    Example:
        >>> import io, tempfile
        >>> root = Path(tempfile.mkdtemp())
        >>> _ = (root / "data.txt").write_text("one document\\n\\nanother one\\n\\na third")
        >>> config = TrainConfig(
        ...     dim=16, layers=1, heads=2, kv_heads=1, head_dim=8, hidden=16, seq_len=16, batch_size=1,
        ...     steps=2, warmup=1, compile=False, dtype="float32", data=str(root / "data.txt"),
        ... )
        >>> summary = train(config, root / "run", against_sdpa=False, console=Console(file=io.StringIO()))
        >>> summary.bits_per_byte_end < summary.bits_per_byte_start
        True
    """
    with nullcontext(ranks) if ranks is not None else open_ranks(config) as ranks:
        began = time.perf_counter()
        console = (console or Console()) if ranks.is_first else Console(quiet=True)
        with ranks.joined(lambda: "the start"):
            config = _settle(config, ranks)
            own = matmul_ceiling(getattr(torch, config.dtype))
            run = _open(config, folder, ranks, resume, from_step)
        with ranks.joined(lambda: run.doing):
            found = _train(run, console, own, observe)
        if ranks.is_first:
            replace(found, seconds=time.perf_counter() - began).save(folder / _SUMMARY)
        try:
            with ranks.joined(lambda: run.doing):
                parity, comparison = _compared(run, console, against_sdpa, against_one_rank)
                found = replace(found, parity=parity, comparison=comparison)
                # The first rank's, which alone has seen all of it.
                summary = ranks.first(lambda: replace(found, seconds=time.perf_counter() - began))
        except Exception:
            found.show(console)  # The run itself is over, and saved.
            raise
        if ranks.is_first:
            summary.save(folder / _SUMMARY)
        summary.show(console)
        return summary


def _train(
    run: Run,
    console: Console,
    own: float,
    observe: Callable[[float], AbstractContextManager[Observer]] | None,
) -> Summary:
    """From the first compilation to the last figure of the run; ``own`` is the ceiling of this rank."""
    config, ranks = run.config, run.ranks
    [ceiling] = ranks.sum([own])
    _introduce(run, console, ceiling)
    before = Graphs.now()
    compile_seconds = run.stepper.warm_up(run.held_out[0])
    if not run.done:
        run.start_score = run.score()
    warm = Graphs.now()
    with observe(own) if observe else nullcontext(UNOBSERVED) as observer:
        results = _loop(run, console, ceiling, observer)
    [peak] = ranks.sum([float(peak_memory())])
    end_score = run.score()
    later = Graphs.now() - warm
    # From here on the weights no longer matter: profiling and comparing take further steps.
    run.doing = "the figures at the end"
    share = attention_share(run.stepper, list(itertools.islice(run.stream, _PROFILED_STEPS)))
    return Summary(
        bits_per_byte_start=run.start_score,
        bits_per_byte_end=end_score,
        steps=config.steps,
        tokens_per_second=_middle(results, "tokens_per_second"),
        mfu=_middle(results, "mfu"),
        ceiling=ceiling,
        dtype=config.dtype,
        compile_seconds=compile_seconds if config.compile else 0.0,
        warm=warm - before if config.compile else None,
        later=later if config.compile else None,
        share=share,
        peak_memory=round(peak),
        seconds=0.0,
        comparison=None,
        ranks=_in_words(config),
    )


def _compared(
    run: Run, console: Console, against_sdpa: bool, against_one_rank: bool
) -> tuple[Parity | None, Comparison | None]:
    """What the same steps come to otherwise: on one rank, and with SDPA."""
    run.doing = "the comparisons at the end"
    if run.ranks.group is None:
        return None, compare(run.stepper, run.stream, _COMPARED_STEPS) if against_sdpa else None
    in_turn = against_sdpa and run.ranks.on_one_machine and run.config.attention == "attnspan"
    if against_sdpa and not in_turn:
        reason = (
            "the ranks are on several machines" if run.config.attention == "attnspan" else "it trained so"
        )
        console.print(f"no step times of sdpa: {reason}")
    one = one_rank(run) if run.ranks.is_first and (in_turn or against_one_rank) else None
    parity = check_parity(run, one, _REPEATED_STEPS) if one is not None and against_one_rank else None
    comparison = compare_ranks(run, one, _COMPARED_STEPS) if in_turn else None
    run.ranks.wait_for_first()
    return parity, comparison


def _in_words(config: TrainConfig) -> str:
    if config.world == 1:
        return "1"
    sharded = ", parameters sharded" if config.fsdp else ""
    return f"{config.world}: cp {config.cp}, dp {config.dp}{sharded}; threads of each: {config.threads}"


def _open(config: TrainConfig, folder: Path, ranks: Ranks, resume: bool, from_step: int | None) -> Run:
    store = CheckpointStore(folder / "checkpoints")
    if ranks.first(lambda: _opened_before(folder)):
        resume, from_step = ranks.first(lambda: bool(store.steps())), None
    if not resume:
        ranks.first(lambda: _refuse_used(store, folder))
    run = Run.open(config, folder, ranks)
    if resume:
        run.load(from_step)
    # Only now, so that data which cannot be read leave no empty folder behind.
    ranks.first(lambda: _keep(config, folder))
    return run


def _opened_before(folder: Path) -> bool:
    """Whether this job had opened the run before torchrun restarted it; else it is not its own."""
    mark, job = folder / _JOB, job_id()
    ours = job is not None and mark.is_file() and mark.read_text() == job
    if ours and not restarted():
        mark.unlink()  # Of an earlier job of the same name: --rdzv-id may be given twice.
        return False
    return ours


def _refuse_used(store: CheckpointStore, folder: Path) -> None:
    if (store.root / "LATEST").is_file() or store.steps():
        raise ConfigError(
            expected="a new run", got=f"{folder}, which holds one", remedy="pass --resume, or another --name"
        )


def _keep(config: TrainConfig, folder: Path) -> None:
    """Write the options of a new run, or of one that goes on on other ranks."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / _CONFIG
    if not path.is_file() or TrainConfig.load(path) != config:
        config.save(path)
    if (job := job_id()) is not None:
        draft = folder / f".{_JOB}.tmp"
        draft.write_text(job)
        draft.rename(folder / _JOB)


def _settle(config: TrainConfig, ranks: Ranks) -> TrainConfig:
    """Decide what was left open, so that a resumed run computes as the first part did, bit by bit."""
    torch.set_num_threads(config.threads or ranks.first(torch.get_num_threads))
    config = replace(config, threads=torch.get_num_threads())
    return replace(config, dtype=ranks.first(faster_dtype)) if config.dtype == "auto" else config


def _middle(results: list[dict[str, float]], name: str) -> float:
    # A run that was resumed at its very end has taken no step.
    return median(figures[name] for figures in results) if results else 0.0


def _introduce(run: Run, console: Console, ceiling: float) -> None:
    config, data = run.config, run.data
    parameters = sum(parameter.numel() for parameter in run.stepper.model.parameters())
    lines = {
        "data": f"{data.source}: {len(data.train):,} documents, {decimal(data.train.num_bytes)}; "
        f"{len(data.held_out):,} held out for the score",
        "model": f"{parameters / 1e6:.2f} M parameters, {config.layers} blocks, {config.heads} heads "
        f"on {config.kv_heads}, rows of {config.seq_len:,} tokens",
        "how": f"{config.attention} attention, {config.dtype}, {torch.get_num_threads()} threads"
        f"{' of each rank' if config.world > 1 else ''}, ceiling {ceiling / 1e9:,.0f} GFLOP/s",
        "ranks": _in_words(config),
        "run": str(run.folder) + (f", resumed at step {run.done}" if run.done else ""),
    }
    for name, text in lines.items():
        console.print(f"[bold]{name:>6}[/bold]  {text}", soft_wrap=True, highlight=False)
    if run.config.compile:
        console.print("        compiling ...", soft_wrap=True, highlight=False)


def _loop(run: Run, console: Console, ceiling: float, observer: Observer) -> list[dict[str, float]]:
    """The steps that are left; figures of each."""
    config, results = run.config, []
    with _reporter(run, console) as reporter:
        if not run.done and reporter:
            reporter.scalar("held_out/bits_per_byte", run.start_score, 0)
        for batch in observer.data(_remaining(run)):
            run.doing = f"step {run.done + 1}"
            with observer.step(number=run.done + 1, tokens=batch.tokens.numel() * run.ranks.dp):
                result = run.stepper.step(batch, run.done, observer)
            run.done += 1
            figures = metrics(run.done, result, ceiling)
            results.append(figures)
            if reporter:
                reporter.update(figures)
            due = config.checkpoint_every and run.done % config.checkpoint_every == 0
            if due or run.done == config.steps:
                run.doing = f"the checkpoint of step {run.done}"
                run.save()
    return results


def _reporter(run: Run, console: Console) -> AbstractContextManager[Reporter | None]:
    if not run.ranks.is_first:
        return nullcontext()
    return Reporter(console, run.folder, run.done, run.config.steps)


def _remaining(run: Run) -> Iterator[Batch]:
    while run.done < run.config.steps:
        yield next(run.stream)

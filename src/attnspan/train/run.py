"""A training run from its options to its summary."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.filesize import decimal
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful

from attnspan.train.checkpoint import CheckpointStore
from attnspan.train.config import TrainConfig
from attnspan.train.documents import Data, load_data
from attnspan.train.errors import CheckpointError, ConfigError
from attnspan.train.hooks import UNOBSERVED, Observer
from attnspan.train.machine import faster_dtype, matmul_ceiling, peak_memory
from attnspan.train.measure import Graphs, attention_share, compare
from attnspan.train.packing import Batch, PackedStream, pack_once
from attnspan.train.progress import Reporter, metrics
from attnspan.train.step import Stepper
from attnspan.train.summary import Summary
from attnspan.train.vocabulary import load_vocabulary

__all__ = ["Run", "resume_config", "train"]

_CONFIG = "config.json"
_PROFILED_STEPS = 3
_COMPARED_STEPS = 5


class _State(Stateful):
    """Model and optimizer in the form that `torch.distributed.checkpoint` can also shard."""

    def __init__(self, stepper: Stepper) -> None:
        self._stepper = stepper

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self._stepper.model, self._stepper.optimizer)
        return {"model": model, "optimizer": optimizer, "rng": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self._stepper.model,
            self._stepper.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        torch.set_rng_state(state["rng"])


@dataclass
class Run:
    """Everything that lives as long as a run.

    Args:
        config: Options, with the dtype resolved.
        folder: The run's folder.
        data: Tokenized documents.
        stepper: Model and optimizer.
        stream: Training batches.
        held_out: Batches of the held-out score.
        store: Checkpoints.
        done: Steps taken.
        start_score: Held-out bits per byte of the untrained model.

    Example:
        >>> sorted(Run.__dataclass_fields__)[:3]
        ['config', 'data', 'done']
    """

    config: TrainConfig
    folder: Path
    data: Data
    stepper: Stepper
    stream: PackedStream
    held_out: list[Batch]
    store: CheckpointStore
    done: int = 0
    start_score: float = float("nan")

    @classmethod
    def open(cls, config: TrainConfig, folder: Path) -> Run:
        """Read the data and build the model.

        Args:
            config: Options, with the dtype resolved.
            folder: The run's folder.

        Raises:
            DataError: The data cannot be read.
        """
        vocabulary = load_vocabulary(config.tokenizer)
        data = load_data(config, vocabulary)
        shape = {"seq_len": config.seq_len, "batch_size": config.batch_size}
        return cls(
            config,
            folder,
            data,
            Stepper(config, vocabulary.end + 1),
            PackedStream(data.train, **shape, seed=config.seed),
            pack_once(data.held_out, **shape),
            CheckpointStore(folder / "checkpoints"),
        )

    def score(self) -> float:
        """Held-out bits per byte of the present weights."""
        return self.stepper.bits_per_byte(self.held_out, self.data.held_out.num_bytes)

    def save(self) -> None:
        """Write a checkpoint of the present state."""
        progress = {
            "data": self.stream.state_dict(),
            "digests": _digests(self.data),
            "start_score": self.start_score,
        }
        self.store.save(self.done, {"state": _State(self.stepper)}, progress)

    def load(self, step: int | None) -> None:
        """Return to a checkpoint.

        Args:
            step: Which one; None takes the latest.

        Raises:
            CheckpointError: There is none, it is damaged, or it was trained on other data.
        """
        self.done, progress = self.store.load({"state": _State(self.stepper)}, step)
        self._refuse_other_data(progress.get("digests", {}))
        self.stream.load_state_dict(progress["data"])
        self.start_score = progress["start_score"]

    def _refuse_other_data(self, stored: dict[str, str]) -> None:
        for part, digest in _digests(self.data).items():
            if stored.get(part) != digest:
                raise CheckpointError(
                    expected=f"the {part} documents that {self.folder} was trained with, sha256 "
                    f"{stored.get(part, 'not recorded')}",
                    got=f"{digest} from {self.data.source}",
                    remedy="restore the data and the tokenizer file as they were, "
                    "or start a new run under another --name",
                )


def _digests(data: Data) -> dict[str, str]:
    return {"training": data.train.digest, "held-out": data.held_out.digest}


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
    observe: Callable[[float], AbstractContextManager[Observer]] | None = None,
    console: Console | None = None,
) -> Summary:
    """Train a model; at the end print and save what came of it.

    Args:
        config: Options. When resuming, those of the run itself (`resume_config`).
        folder: The run's folder, for checkpoints, metrics, TensorBoard events and ``summary.json``.
        resume: Go on from a checkpoint.
        from_step: Which checkpoint to resume from; None takes the latest.
        against_sdpa: Time some steps against SDPA at the end.
        observe: Makes the observer of the steps, from the measured ceiling in FLOP/s; it is open during them.
        console: Where people read; standard output by default.

    Returns:
        The figures of the run.

    Raises:
        ConfigError: The folder already holds a run, and it is not to be resumed.
        DataError: The data cannot be read.
        CheckpointError: There is nothing to resume from, or it is damaged.

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
    began = time.perf_counter()
    console = console or Console()
    config = _settle(config)
    ceiling = matmul_ceiling(getattr(torch, config.dtype))
    run = _resumed(config, folder, from_step) if resume else _started(config, folder)
    _introduce(run, console, ceiling)
    before = Graphs.now()
    compile_seconds = run.stepper.warm_up(run.held_out[0])
    if not resume:
        run.start_score = run.score()
    warm = Graphs.now()
    with observe(ceiling) if observe else nullcontext(UNOBSERVED) as observer:
        results = _loop(run, console, ceiling, observer)
    peak = peak_memory()
    end_score = run.score()
    later = Graphs.now() - warm
    # From here on the weights no longer matter: profiling and comparing take further steps.
    share = attention_share(run.stepper, list(itertools.islice(run.stream, _PROFILED_STEPS)))
    comparison = compare(run.stepper, run.stream, _COMPARED_STEPS) if against_sdpa else None
    summary = Summary(
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
        peak_memory=peak,
        seconds=time.perf_counter() - began,
        comparison=comparison,
    )
    summary.save(folder / "summary.json")
    summary.show(console)
    return summary


def _started(config: TrainConfig, folder: Path) -> Run:
    store = folder / "checkpoints"
    if (store / "LATEST").is_file() or CheckpointStore(store).steps():
        raise ConfigError(
            expected="a new run", got=f"{folder}, which holds one", remedy="pass --resume, or another --name"
        )
    run = Run.open(config, folder)
    # Only now, so that data which cannot be read leave no empty folder behind.
    folder.mkdir(parents=True, exist_ok=True)
    config.save(folder / _CONFIG)
    return run


def _resumed(config: TrainConfig, folder: Path, from_step: int | None) -> Run:
    run = Run.open(config, folder)
    run.load(from_step)
    return run


def _settle(config: TrainConfig) -> TrainConfig:
    """Decide what was left open, so that a resumed run computes as the first part did, bit by bit."""
    if config.threads:
        torch.set_num_threads(config.threads)
    config = replace(config, threads=torch.get_num_threads())
    return replace(config, dtype=faster_dtype()) if config.dtype == "auto" else config


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
        "how": f"{config.attention} attention, {config.dtype}, {torch.get_num_threads()} threads, "
        f"ceiling {ceiling / 1e9:,.0f} GFLOP/s",
        "run": str(run.folder) + (f", resumed at step {run.done}" if run.done else ""),
    }
    for name, text in lines.items():
        console.print(f"[bold]{name:>6}[/bold]  {text}", soft_wrap=True, highlight=False)
    if run.config.compile:
        console.print("        compiling ...", soft_wrap=True, highlight=False)


def _loop(run: Run, console: Console, ceiling: float, observer: Observer) -> list[dict[str, float]]:
    """The steps that are left; figures of each."""
    config, results = run.config, []
    with Reporter(console, run.folder, run.done, config.steps) as reporter:
        if not run.done:
            reporter.scalar("held_out/bits_per_byte", run.start_score, 0)
        for batch in observer.data(_remaining(run)):
            with observer.step(number=run.done + 1, tokens=batch.tokens.numel()):
                result = run.stepper.step(batch, run.done, observer)
            run.done += 1
            figures = metrics(run.done, result, ceiling)
            results.append(figures)
            reporter.update(figures)
            due = config.checkpoint_every and run.done % config.checkpoint_every == 0
            if due or run.done == config.steps:
                run.save()
    return results


def _remaining(run: Run) -> Iterator[Batch]:
    while run.done < run.config.steps:
        yield next(run.stream)

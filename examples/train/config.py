"""The options of a training run, and the job's errors. This module loads no framework."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

from attnspan.errors import OptionError
from attnspan.parallel.strategy import Strategy
from attnspan_lab.console import option

__all__ = ["CheckpointError", "ConfigError", "DataError", "JobError", "RankError", "TrainConfig"]


class JobError(OptionError):
    """Base class of the training job's errors.

    Each one has the expected value, the actual value and a remedy.
    """

    what: ClassVar[str]
    #: Whether every rank raises the error, so that one rank may report it for all.
    shared = False

    def __init_subclass__(cls, what: str) -> None:
        cls.what = what

    def __init__(self, expected: str, got: object, remedy: str) -> None:
        super().__init__(self.what, expected=expected, got=str(got), remedy=remedy)

    @classmethod
    def unless(cls, holds: object, expected: str, got: object, remedy: str) -> None:
        """Raise the error unless a condition holds."""
        if not holds:
            raise cls(expected, got, remedy)


class ConfigError(JobError, what="options"):
    """An option of the job has an invalid value."""


class DataError(JobError, what="data"):
    """The data or the tokenizer cannot be read, or there is too little data."""


class CheckpointError(JobError, what="checkpoint"):
    """A checkpoint is missing, damaged, or belongs to another configuration."""


class RankError(JobError, what="ranks"):
    """Another rank has ended, or does not answer."""


CHOICES = {
    "attention": ("attnspan", "sdpa", "sdpa-documents"),
    "ac": ("none", "selective", "full"),
    "dtype": ("auto", "float32", "bfloat16"),
    "device": ("auto", "cpu", "cuda"),
    "method": ("balanced", "contiguous", "zigzag"),
}


def _in(panel: str) -> Any:
    """Make a function for fields with a default and a comment, which the help shows in this panel."""
    return lambda default, comment: option(panel, comment, default=default)


_model, _data, _optimum = _in("Model"), _in("Data"), _in("Optimization")
_how, _ranks = _in("Execution"), _in("Ranks")


@dataclass(frozen=True)
class TrainConfig:
    """Configuration of a model and its training run. Values out of range raise a ConfigError."""

    dim: int = _model(256, "width of the residual stream")
    layers: int = _model(4, "number of decoder blocks")
    heads: int = _model(4, "number of query heads")
    kv_heads: int = _model(2, "number of key/value heads (GQA), a divisor of --heads")
    head_dim: int = _model(64, "head dim, an even number")
    hidden: int = _model(704, "inner width of the SwiGLU feed-forward layer")
    rope_theta: float = _model(10_000.0, "base of the rotary wavelengths")
    norm_eps: float = _model(1e-5, "epsilon of RMSNorm")

    data: str | None = _data(None, "folder, .txt, .jsonl or .parquet (default: Python's standard library)")
    text_field: str = _data("text", "field of .jsonl and .parquet rows that contains the document")
    tokenizer: str | None = _data(None, "local `tokenizers` JSON file (default: bytes)")
    seq_len: int = _data(2048, "tokens per packed row")
    batch_size: int = _data(1, "packed rows per replica and micro-batch")
    accumulate: int = _data(1, "micro-batches per step (gradient accumulation)")
    held_out: float = _data(0.02, "share of the documents for evaluation")
    eval_bytes: int = _data(131_072, "bytes of held-out text to score at the start and at the end")
    workers: int = _data(1, "processes that pack rows and plan attention in advance (0: this process)")

    steps: int = _optimum(0, "optimizer steps (0: as many as fit into --minutes)")
    minutes: float = _optimum(4.0, "without --steps: wall time of the run")
    lr: float = _optimum(3e-3, "peak learning rate")
    warmup: int = _optimum(60, "steps of linear warm-up (without --steps at most a tenth of the run)")
    min_lr: float = _optimum(0.1, "last learning rate, as a fraction of the peak")
    weight_decay: float = _optimum(0.1, "AdamW weight decay, only for matrices")
    clip: float = _optimum(1.0, "maximum norm of the whole gradient")
    seed: int = _optimum(0, "seed of the weights and of the document order")

    device: str = _how("auto", "cpu, cuda, or auto (cuda if available)")
    attention: str = _how("attnspan", "attnspan, sdpa (dense mask) or sdpa-documents (one call per document)")
    ac: str = _how("none", "activation checkpointing: none, selective (attention is saved) or full")
    dtype: str = _how("auto", "float32, bfloat16 (mixed precision), or auto (the faster one, measured)")
    compile: bool = _how(True, "compile each block with torch.compile(fullgraph=True)")
    threads: int = _how(0, "CPU threads per rank (0: torch's default)")
    checkpoint_every: int = _how(200, "steps between checkpoints (0: only one at the end)")
    profile: str | None = _how(None, "folder for a torch.profiler trace of a few steps")

    cp: int = _ranks(1, "ranks that share each row (context parallelism)")
    dp: int = _ranks(1, "replicas with different rows (data parallelism)")
    fsdp: bool = _ranks(False, "shard parameters, gradients and optimizer over all ranks (FSDP2)")
    strategy: str = _ranks("auto", "exchange of keys: auto, exchange, ring, ulysses or hybrid(u, r)")
    method: str = _ranks("balanced", "partition of rows over ranks: balanced, contiguous or zigzag")
    timeout: float = _ranks(300.0, "seconds that a rank waits for the other ranks")

    def __post_init__(self) -> None:
        check = ConfigError.unless
        for name, choices in CHOICES.items():
            value, wanted = getattr(self, name), f"--{name} to be one of {', '.join(choices)}"
            check(value in choices, wanted, repr(value), "Choose one of these")
        for item in fields(self):
            value, kind = getattr(self, item.name), type(item.default)
            lowest = _LOWEST.get(item.name, 0 if kind is float else 1)
            if kind in (int, float):
                wanted = f"a finite --{item.name.replace('_', '-')} of at least {lowest}"
                check(lowest <= value < math.inf, wanted, value, "Pass such a number")
        check(self.threads <= 1024, "--threads of at most 1024", self.threads, "Pass the number of cores")
        if self.strategy != "auto":
            Strategy.parse(self.strategy, self.cp)
        heads = f"{self.heads} heads and {self.kv_heads} key/value heads"
        check(self.heads % self.kv_heads == 0, "--kv-heads to divide --heads", heads, "Choose a divisor")
        check(self.head_dim % 2 == 0, "an even --head-dim", self.head_dim, "Rotary embedding rotates pairs")
        check(self.held_out < 1, "--held-out below 1", self.held_out, "Leave some documents to train on")
        got = f"--attention {self.attention} and --cp {self.cp}"
        remedy = f"SDPA cannot share a row between ranks: pass --cp 1 --dp {self.world}"
        whole = self.cp == 1 or self.attention == "attnspan"
        check(whole, "--attention attnspan with --cp above 1", got, remedy)

    @property
    def world(self) -> int:
        """Number of ranks of the job."""
        return self.cp * self.dp

    def row_shape(self, rank: int) -> dict[str, Any]:
        """Return the arguments of `PackedStream` for a rank."""
        share = rank // self.cp, self.dp
        return {"seq_len": self.seq_len, "batch_size": self.batch_size, "share": share}

    def moved(self, **changes: Any) -> TrainConfig:
        """Change fields in `MOVABLE`, such as the number of ranks or steps, without changing the training.

        The rows of a step stay the same. Each replica takes its share of them.

        Example:
            >>> TrainConfig(dp=2, batch_size=2).moved(dp=1, accumulate=2).batch_size
            2
        """
        strategy = self.strategy if changes.get("cp", self.cp) == self.cp else "auto"
        kept: dict[str, Any] = {"batch_size": 1, "strategy": strategy}
        new = replace(self, **kept | changes)
        rows = self.dp * self.batch_size * self.accumulate
        parts, remedy = new.dp * new.accumulate, "Choose a divisor, so that the training does not change"
        wanted = f"--dp times --accumulate to divide the {rows} rows of a step"
        ConfigError.unless(rows % parts == 0, wanted, parts, remedy)
        return replace(new, batch_size=rows // parts)

    @classmethod
    def load(cls, path: Path) -> TrainConfig:
        """Read a configuration from JSON. Any other file raises a ConfigError."""
        try:
            return cls(**json.loads(path.read_text()))
        except (OSError, TypeError, ValueError) as error:
            got, remedy = f"{path}: {error}", "Restore the file, or start a new run with another --name"
            raise ConfigError("a run configuration", got, remedy) from None


#: Lower bounds, if they differ from 0 for a float and 1 for an int.
_LOWEST = {"minutes": 0.1, "timeout": 1, "rope_theta": 1, "warmup": 0, "seed": 0, "threads": 0, "workers": 0}
_LOWEST |= {"steps": 0, "checkpoint_every": 0}

#: Fields that may change on resuming: execution, trace folder and length of the training.
MOVABLE: tuple[str, ...] = ("cp", "dp", "fsdp", "strategy", "method", "accumulate")
MOVABLE += ("threads", "workers", "timeout", "profile", "steps")

"""Everything that can be set about a training run, and the job's errors. Loads no framework."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from attnspan.errors import _Explained
from attnspan.parallel.strategy import Strategy
from attnspan_lab.console import option

__all__ = ["CheckpointError", "ConfigError", "DataError", "JobError", "RankError", "TrainConfig"]


class JobError(_Explained, ValueError):
    """Base of the training job's errors: what was expected, what came, how to mend it."""

    what: ClassVar[str]
    #: Whether every rank raises it, so that one of them may speak for all.
    shared = False

    def __init_subclass__(cls, what: str) -> None:
        cls.what = what

    @classmethod
    def of(cls, expected: str, got: object, remedy: str) -> Self:
        """The error."""
        return cls(cls.what, expected=expected, got=str(got), remedy=remedy)

    @classmethod
    def unless(cls, holds: object, expected: str, got: object, remedy: str) -> None:
        """Raise it unless a rule holds."""
        if not holds:
            raise cls.of(expected, got, remedy)


class ConfigError(JobError, what="options"):
    """An option of the job has a value it cannot have."""


class DataError(JobError, what="data"):
    """The data or the tokenizer cannot be read, or there is too little of it."""


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
    """Makes fields with a default and a comment; the command line shows the comment as help, in a panel."""
    return lambda default, comment: option(panel, comment, default=default)


_model, _data, _optimum = _in("The model"), _in("The data"), _in("The optimization")
_how, _ranks = _in("How it is computed"), _in("The ranks")


@dataclass(frozen=True)
class TrainConfig:
    """Configuration of a model and its training run; a value out of range raises a ConfigError."""

    dim: int = _model(256, "width of the residual stream")
    layers: int = _model(4, "number of decoder blocks")
    heads: int = _model(4, "query heads")
    kv_heads: int = _model(2, "key/value heads; divides --heads")
    head_dim: int = _model(64, "width of one head; even, for the rotation of pairs")
    hidden: int = _model(704, "inner width of the SwiGLU feed-forward layer")
    rope_theta: float = _model(10_000.0, "base of the rotary wavelengths")
    norm_eps: float = _model(1e-5, "epsilon of RMSNorm")

    data: str | None = _data(None, "folder, .txt, .jsonl or .parquet; default: Python's standard library")
    text_field: str = _data("text", "field of .jsonl and .parquet rows that holds the document")
    tokenizer: str | None = _data(None, "local `tokenizers` JSON file; default: bytes")
    seq_len: int = _data(2048, "tokens per packed row")
    batch_size: int = _data(1, "packed rows that a replica computes at a time")
    accumulate: int = _data(1, "how many times it does so in each step: gradient accumulation")
    held_out: float = _data(0.02, "share of the documents kept for evaluation")
    eval_bytes: int = _data(131_072, "bytes of held-out text scored at the start and at the end")
    workers: int = _data(1, "processes that pack rows and plan attention ahead of the steps; 0: in this one")

    steps: int = _optimum(0, "optimizer steps; 0: as many as fit into --minutes")
    minutes: float = _optimum(4.0, "without --steps: wall time of the run, measured and divided at the start")
    lr: float = _optimum(3e-3, "peak learning rate")
    warmup: int = _optimum(60, "steps of linear warm-up, before the cosine; at most a tenth of --minutes")
    min_lr: float = _optimum(0.1, "last learning rate, as a share of the peak")
    weight_decay: float = _optimum(0.1, "AdamW decay, on matrices only")
    clip: float = _optimum(1.0, "largest norm of the whole gradient")
    seed: int = _optimum(0, "seed of the weights and of the document order")

    device: str = _how("auto", "cpu, cuda, or auto: cuda where there is one")
    attention: str = _how(
        "attnspan", "attnspan, sdpa (torch's own, dense mask), or sdpa-documents (one call each)"
    )
    ac: str = _how("none", "activation checkpointing: none, selective (keeps attention) or full")
    dtype: str = _how("auto", "float32, bfloat16 (mixed precision), or auto: the faster, measured")
    compile: bool = _how(True, "compile each block with torch.compile(fullgraph=True)")
    threads: int = _how(0, "CPU threads of each rank; 0 takes torch's default")
    checkpoint_every: int = _how(200, "steps between checkpoints; 0 keeps only the last")
    profile: str | None = _how(None, "folder for a torch.profiler trace of a few steps")

    cp: int = _ranks(1, "ranks that share each row: context parallelism")
    dp: int = _ranks(1, "replicas with rows of their own: data parallelism")
    fsdp: bool = _ranks(False, "shard parameters, gradients and optimizer over all ranks (FSDP2)")
    strategy: str = _ranks("auto", "how ranks exchange keys: auto, exchange, ring, ulysses, hybrid(u, r)")
    method: str = _ranks("balanced", "how rows are partitioned: balanced, contiguous or zigzag")
    timeout: float = _ranks(300.0, "seconds after which a rank that waits for the others gives up")

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
        check(self.head_dim % 2 == 0, "an even --head-dim", self.head_dim, "Rotary embedding turns pairs")
        check(self.held_out < 1, "--held-out below 1", self.held_out, "Leave some documents to train on")
        got = f"--attention {self.attention} and --cp {self.cp}"
        remedy = f"Torch's attention cannot share a row under such a mask: pass --cp 1 --dp {self.world}"
        whole = self.cp == 1 or self.attention == "attnspan"
        check(whole, "--attention attnspan with --cp above 1", got, remedy)

    @property
    def world(self) -> int:
        """Ranks of the job."""
        return self.cp * self.dp

    def row_shape(self, rank: int) -> dict[str, int]:
        """Rows that a rank packs: arguments of `PackedStream` and `pack_once`."""
        shape = {"seq_len": self.seq_len, "batch_size": self.batch_size}
        return shape | {"replica": rank // self.cp, "replicas": self.dp}

    def moved(self, **changes: Any) -> TrainConfig:
        """The same training with other values of the fields in `MOVABLE`: on other ranks, for more steps.

        The rows of a step stay what they were; each replica takes its share of them.

        Example:
            >>> TrainConfig(dp=2, batch_size=2).moved(dp=1, accumulate=2).batch_size
            2
        """
        strategy = self.strategy if changes.get("cp", self.cp) == self.cp else "auto"
        kept: dict[str, Any] = {"batch_size": 1, "strategy": strategy}
        new = replace(self, **kept | changes)
        rows = self.dp * self.batch_size * self.accumulate
        parts, remedy = new.dp * new.accumulate, "Choose a divisor, so that the training stays what it was"
        wanted = f"--dp times --accumulate to divide the {rows} rows of a step"
        ConfigError.unless(rows % parts == 0, wanted, parts, remedy)
        return replace(new, batch_size=rows // parts)

    @classmethod
    def load(cls, path: Path) -> TrainConfig:
        """Read a configuration from JSON; another file raises a ConfigError."""
        try:
            return cls(**json.loads(path.read_text()))
        except (OSError, TypeError, ValueError) as error:
            got, remedy = f"{path}: {error}", "Restore the file, or start a new run under another --name"
            raise ConfigError.of("a run configuration", got, remedy) from None


#: Lower bounds of the numbers that are neither 0 for a float nor 1 for an int.
_LOWEST = {"minutes": 0.1, "timeout": 1, "rope_theta": 1, "warmup": 0, "seed": 0, "threads": 0, "workers": 0}
_LOWEST |= {"steps": 0, "checkpoint_every": 0}

#: What may differ on resuming: how a training is computed, where its trace goes, and how long it is.
MOVABLE: tuple[str, ...] = ("cp", "dp", "fsdp", "strategy", "method", "accumulate")
MOVABLE += ("threads", "workers", "timeout", "profile", "steps")

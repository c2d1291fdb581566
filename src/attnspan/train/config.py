"""Everything that can be set about a training run, in one dataclass, and the job's errors. Loads no framework."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from attnspan.errors import _Explained, expect

__all__ = ["CheckpointError", "ConfigError", "DataError", "JobError", "RankError", "TrainConfig"]


class JobError(_Explained, ValueError):
    """Base of the training job's errors: what was expected, what came, how to mend it."""

    #: Whether every rank raises it, so that one of them may speak for all.
    shared = False


class ConfigError(JobError):
    """An option of the job has a value it cannot have."""


class DataError(JobError):
    """The data or the tokenizer cannot be read, or there is too little of it."""


class CheckpointError(JobError):
    """A checkpoint is missing, damaged, or belongs to another configuration."""


class RankError(JobError):
    """Another rank has ended, or does not answer."""


CHOICES = {
    "attention": ("attnspan", "sdpa", "sdpa-documents"),
    "ac": ("none", "selective", "full"),
    "dtype": ("auto", "float32", "bfloat16"),
    "device": ("auto", "cpu", "cuda"),
    "method": ("balanced", "contiguous", "zigzag"),
}


def _option(panel: str, default: Any, comment: str) -> Any:
    """A field with its comment; the command line shows the same text as help, in a panel."""
    return field(default=default, metadata={"help": comment, "panel": panel})


_model = partial(_option, "The model")
_data = partial(_option, "The data")
_optimum = partial(_option, "The optimization")
_how = partial(_option, "How it is computed")
_ranks = partial(_option, "The ranks")


@dataclass(frozen=True)
class TrainConfig:
    """Configuration of a model and its training run.

    The comment of each field is its second argument, because the command line prints it too.

    Raises:
        ConfigError: A value is out of range or names nothing that exists.

    Example:
        >>> TrainConfig(heads=8, kv_heads=3)
        Traceback (most recent call last):
        attnspan.train.config.ConfigError: options: expected --kv-heads to divide --heads, got 8 and 3. Choose a divisor.
    """

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
    dtype: str = _how(
        "auto", "float32, bfloat16 (mixed precision), or auto: the faster, measured at start-up"
    )
    compile: bool = _how(True, "compile each block with torch.compile(fullgraph=True)")
    threads: int = _how(0, "CPU threads of each rank; 0 takes torch's default")
    checkpoint_every: int = _how(200, "steps between checkpoints; 0 keeps only the last")
    profile: str | None = _how(None, "folder for a torch.profiler trace of a few steps")

    cp: int = _ranks(1, "ranks that share each row: context parallelism")
    dp: int = _ranks(1, "replicas with rows of their own: data parallelism")
    fsdp: bool = _ranks(False, "shard parameters, gradients and optimizer over all ranks (FSDP2)")
    strategy: str = _ranks(
        "auto", "how ranks that share rows exchange keys: auto, exchange, ring, ulysses, ..."
    )
    method: str = _ranks("balanced", "how rows are partitioned: balanced, contiguous or zigzag")
    timeout: float = _ranks(300.0, "seconds after which a rank that waits for the others gives up")

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            listed, value = ", ".join(choices), getattr(self, name)
            _check(value in choices, f"--{name} to be one of {listed}", repr(value), "choose one of these")
        for item in fields(self):
            value, lowest = getattr(self, item.name), _LOWEST.get(item.name, 1)
            if isinstance(value, int | float) and not isinstance(value, bool):
                flag = item.name.replace("_", "-")
                _check(value >= lowest, f"--{flag} of at least {lowest}", value, "pass a larger number")
        heads = f"{self.heads} and {self.kv_heads}"
        _check(self.heads % self.kv_heads == 0, "--kv-heads to divide --heads", heads, "choose a divisor")
        _check(self.head_dim % 2 == 0, "an even --head-dim", self.head_dim, "rotary embedding turns pairs")
        _check(self.held_out < 1, "--held-out below 1", self.held_out, "leave some documents to train on")
        _check(
            self.cp == 1 or self.attention == "attnspan",
            "--attention attnspan with --cp above 1",
            f"--attention {self.attention} and --cp {self.cp}",
            f"torch's attention cannot share a row under such a mask: pass --cp 1 --dp {self.world}",
        )

    @property
    def world(self) -> int:
        """Ranks of the job."""
        return self.cp * self.dp

    @property
    def step_rows(self) -> int:
        """Packed rows of one optimizer step, over all ranks and micro-batches."""
        return self.dp * self.batch_size * self.accumulate

    def moved(self, **changes: Any) -> TrainConfig:
        """The same training, computed otherwise: on other ranks, with other micro-batches, for more steps.

        The rows of a step stay what they were: each replica takes its share of them.

        Args:
            **changes: New values of the fields in `MOVABLE`.

        Raises:
            ConfigError: The rows of a step cannot be divided so.

        Example:
            >>> TrainConfig(dp=2, batch_size=2).moved(dp=1, accumulate=2).batch_size
            2
        """
        new = replace(self, **{"batch_size": 1} | changes)
        parts = new.dp * new.accumulate
        _check(
            self.step_rows % parts == 0,
            f"--dp times --accumulate to divide the {self.step_rows} rows of a step",
            parts,
            "choose a divisor, so that the training stays what it was",
        )
        return replace(new, batch_size=self.step_rows // parts)

    def save(self, path: Path) -> None:
        """Write the configuration as JSON; what was there before stays until all of it is written."""
        draft = path.with_suffix(".tmp")
        draft.write_text(json.dumps(asdict(self), indent=2) + "\n")
        draft.replace(path)

    @classmethod
    def load(cls, path: Path) -> TrainConfig:
        """Read a configuration that `save` wrote.

        Raises:
            ConfigError: The file is not such a configuration.
        """
        try:
            return cls(**json.loads(path.read_text()))
        except (OSError, TypeError, json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(
                "options",
                expected="a run configuration",
                got=f"{path}: {error}",
                remedy="Start a new run without --resume",
            ) from None


#: Lower bounds of the numbers that may be below 1.
_LOWEST = dict.fromkeys(
    ("lr", "warmup", "min_lr", "weight_decay", "clip", "seed", "threads", "workers", "steps",
     "checkpoint_every", "norm_eps", "held_out"),
    0,
) | {"minutes": 0.1}  # fmt: skip

#: What may differ on resuming: how a training is computed, where its trace goes, and how long it is.
MOVABLE = (
    "cp", "dp", "fsdp", "strategy", "method", "accumulate", "threads", "workers", "timeout", "profile", "steps"
)  # fmt: skip


def _check(holds: bool, expected: str, got: object, remedy: str) -> None:
    remedy = remedy[0].upper() + remedy[1:]
    expect(holds, "options", expected, str(got), remedy, error=ConfigError)

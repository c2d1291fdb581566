"""Everything that can be set about a training run, in one dataclass."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from attnspan.train.errors import ConfigError

__all__ = ["TrainConfig"]

CHOICES = {
    "attention": ("attnspan", "sdpa", "sdpa-documents"),
    "ac": ("none", "selective", "full"),
    "dtype": ("auto", "float32", "bfloat16"),
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
        >>> TrainConfig(heads=8, kv_heads=2).heads
        8
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
    tokenizer: str | None = _data(None, "local `tokenizers` JSON file; default: bytes")
    seq_len: int = _data(2048, "tokens per packed row")
    batch_size: int = _data(1, "packed rows per step of each data-parallel replica")
    held_out: float = _data(0.02, "share of the documents kept for evaluation")
    eval_bytes: int = _data(131_072, "bytes of held-out text scored at the start and at the end")

    steps: int = _optimum(1500, "optimizer steps")
    lr: float = _optimum(3e-3, "peak learning rate")
    warmup: int = _optimum(60, "steps of linear warm-up, before the cosine")
    min_lr: float = _optimum(0.1, "last learning rate, as a share of the peak")
    weight_decay: float = _optimum(0.1, "AdamW decay, on matrices only")
    clip: float = _optimum(1.0, "largest norm of the whole gradient")
    seed: int = _optimum(0, "seed of the weights and of the document order")

    attention: str = _how(
        "attnspan", "attnspan, sdpa (torch's own, dense mask), or sdpa-documents (one call each)"
    )
    ac: str = _how("none", "activation checkpointing: none, selective (keeps attention) or full")
    dtype: str = _how("auto", "float32, bfloat16 (autocast), or auto: the faster, measured at start-up")
    compile: bool = _how(True, "compile each block with torch.compile(fullgraph=True)")
    threads: int = _how(0, "CPU threads of each rank; 0 takes torch's default")

    checkpoint_every: int = _how(200, "steps between checkpoints; 0 keeps only the last")

    cp: int = _ranks(1, "ranks that share each row: context parallelism")
    dp: int = _ranks(1, "replicas with rows of their own: data parallelism")
    fsdp: bool = _ranks(False, "shard parameters, gradients and optimizer over all ranks (FSDP2)")
    timeout: float = _ranks(300.0, "seconds after which a rank that waits for the others gives up")

    def __post_init__(self) -> None:
        _check_choices(self)
        _check_ranges(self)
        _check_shapes(self)
        _check_ranks(self)

    @property
    def world(self) -> int:
        """Ranks of the job.

        Example:
            >>> TrainConfig(cp=2, dp=3).world
            6
        """
        return self.cp * self.dp

    def on_ranks(self, **changes: Any) -> TrainConfig:
        """The same training on other ranks: the rows of a step stay, each replica takes its share of them.

        Args:
            **changes: New values of cp, dp, fsdp, threads or timeout.

        Raises:
            ConfigError: The rows of a step cannot be dealt to that many replicas.

        Example:
            >>> TrainConfig(dp=2, batch_size=2).on_ranks(dp=4).batch_size
            1
        """
        rows, dp = self.dp * self.batch_size, changes.get("dp", self.dp)
        if rows % max(1, dp):
            raise ConfigError(
                expected=f"--dp to divide the {rows} rows of a step",
                got=str(dp),
                remedy="choose a divisor, so that the training stays what it was",
            )
        return replace(self, **changes, batch_size=rows // max(1, dp))

    def save(self, path: Path) -> None:
        """Write the configuration as JSON; what was there before stays until all of it is written.

        Args:
            path: File to write.

        Example:
            >>> import tempfile
            >>> path = Path(tempfile.mkdtemp()) / "config.json"
            >>> TrainConfig(steps=7).save(path)
            >>> TrainConfig.load(path).steps
            7
        """
        draft = path.with_suffix(".tmp")
        draft.write_text(json.dumps(asdict(self), indent=2) + "\n")
        draft.replace(path)

    @classmethod
    def load(cls, path: Path) -> TrainConfig:
        """Read a configuration that `save` wrote.

        Args:
            path: File to read.

        Raises:
            ConfigError: The file is not such a configuration.

        Example:
            >>> import tempfile
            >>> path = Path(tempfile.mkdtemp()) / "config.json"
            >>> _ = path.write_text("{")
            >>> TrainConfig.load(path)  # doctest: +ELLIPSIS
            Traceback (most recent call last):
                ...
            attnspan.train.errors.ConfigError: options: expected a run configuration, got ...
        """
        try:
            stored = json.loads(path.read_text())
            return cls(**stored)
        except (OSError, TypeError, json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(
                expected="a run configuration",
                got=f"{path}: {error}",
                remedy="start a new run without --resume",
            ) from None


def _check_choices(config: TrainConfig) -> None:
    for name, choices in CHOICES.items():
        value = getattr(config, name)
        if value not in choices:
            raise ConfigError(
                expected=f"--{name} to be one of {', '.join(choices)}",
                got=repr(value),
                remedy="choose one of these",
            )


# Every number but these is at least 1.
_LOWEST = {
    "lr": 0.0,
    "warmup": 0,
    "min_lr": 0.0,
    "weight_decay": 0.0,
    "clip": 0.0,
    "seed": 0,
    "threads": 0,
    "checkpoint_every": 0,
    "norm_eps": 0.0,
    "held_out": 0.0,
}

# What may be another on resuming, because it changes how a training is computed, not what it computes.
MOVABLE = ("cp", "dp", "fsdp", "threads", "timeout")


def _check_ranges(config: TrainConfig) -> None:
    for item in fields(config):
        value = getattr(config, item.name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        lowest = _LOWEST.get(item.name, 1)
        if not value >= lowest:
            flag = item.name.replace("_", "-")
            raise ConfigError(
                expected=f"--{flag} of at least {lowest}", got=str(value), remedy="pass a larger number"
            )
    if config.held_out >= 1:
        raise ConfigError(
            expected="--held-out below 1", got=str(config.held_out), remedy="leave some documents to train on"
        )


def _check_shapes(config: TrainConfig) -> None:
    if config.heads % config.kv_heads:
        raise ConfigError(
            expected="--kv-heads to divide --heads",
            got=f"{config.heads} heads and {config.kv_heads} key/value heads",
            remedy="choose a divisor",
        )
    if config.head_dim % 2:
        raise ConfigError(
            expected="an even --head-dim",
            got=str(config.head_dim),
            remedy="rotary embedding turns pairs of channels",
        )


def _check_ranks(config: TrainConfig) -> None:
    if config.cp > 1 and config.attention != "attnspan":
        raise ConfigError(
            expected="--attention attnspan beside --cp above 1",
            got=f"--attention {config.attention} and --cp {config.cp}",
            remedy="torch's attention cannot share a row under such a mask: "
            f"pass --cp 1, with --dp {config.cp * config.dp} for as many ranks",
        )

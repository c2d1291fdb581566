"""What a user of the training job may get wrong, each said as: expected, got, remedy."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

__all__ = ["CheckpointError", "ConfigError", "DataError", "JobError", "RankError"]


class JobError(ValueError):
    """Base of the training job's errors.

    Args:
        expected: What the job needs.
        got: What it was given.
        remedy: What to do about it.

    Example:
        >>> raise ConfigError(expected="--steps of 1 or more", got="0", remedy="pass more")
        Traceback (most recent call last):
            ...
        attnspan.train.errors.ConfigError: options: expected --steps of 1 or more, got 0. Pass more.
    """

    what: ClassVar[str] = "train"

    #: Whether every rank raises it, so that one of them may speak for all.
    shared = False

    def __init__(self, *, expected: str, got: str, remedy: str) -> None:
        super().__init__(f"{self.what}: expected {expected}, got {got}. {remedy[0].upper()}{remedy[1:]}.")
        self._parts = {"expected": expected, "got": got, "remedy": remedy}

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors travel between ranks; an exception's own way is to call it with the message alone.
        return partial(type(self), **self._parts), ()


class ConfigError(JobError):
    """An option of the job has a value it cannot have."""

    what = "options"


class DataError(JobError):
    """The data or the tokenizer cannot be read, or there is too little of it."""

    what = "data"


class CheckpointError(JobError):
    """A checkpoint is missing, damaged, or belongs to another configuration."""

    what = "checkpoint"


class RankError(JobError):
    """Another rank has ended, or does not answer."""

    what = "ranks"

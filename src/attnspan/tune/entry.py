"""What a search found for one key: the record that goes into the cache, with the samples it rests on."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from attnspan.bench._plain import from_plain
from attnspan.bench.results import TuningGain
from attnspan.bench.samples import Ratio, Timing
from attnspan.kernels.tuned import Key, installed_version
from attnspan.tune.search import Search

__all__ = ["Entry", "Failure"]


@dataclass(frozen=True)
class Failure:
    """A configuration that could not be used, which is a finding like any other.

    Args:
        config: The configuration.
        error: "Type: text" of what it raised.

    Example:
        >>> Failure({"block_q": 7}, "ValueError: not a multiple of 16").config
        {'block_q': 7}
    """

    config: dict[str, int]
    error: str


@dataclass(frozen=True)
class Entry:
    """What a search found for one key.

    Args:
        key: The calls it is for.
        config: What these calls use: the contender where it was accepted, else the default.
        version: The attnspan that timed it; another version does not use the entry.
        contender: The best candidate, or the default where there was no candidate left.
        default: Times of the default, in turn with ``tuned``; None where the search was cut off before.
        tuned: Times of the contender.
        ratio: Default over contender.
        reason: Why the contender was accepted or not.
        tried: Candidates that were timed or failed.
        failures: Candidates that failed.
        problem: What was timed: shapes, mask, threads.
        date: When, in UTC, ISO 8601.

    Example:
        >>> key = Key("cpu", "forward", "avx2", "float32", 64, 10, "half")
        >>> entry = Entry(key, {"block_q": 64}, version="1", contender={"block_q": 64})
        >>> str(entry.key), entry.gain is None
        ('cpu forward avx2 float32 D=64 S<=1024 half', True)
    """

    key: Key
    config: dict[str, int]
    version: str
    contender: dict[str, int]
    default: Timing | None = None
    tuned: Timing | None = None
    ratio: Ratio | None = None
    reason: str = ""
    tried: int = 0
    failures: tuple[Failure, ...] = ()
    problem: dict[str, Any] = field(default_factory=dict)
    date: str = ""

    @classmethod
    def of(cls, key: Key, found: Search, problem: dict[str, Any]) -> Entry:
        """The record of a finished search, now and by this version.

        Args:
            key: The calls it is for.
            found: What the search found.
            problem: What was timed.

        Example:
            >>> from attnspan.tune.search import search
            >>> found = search(lambda config: lambda: None, [], {}, seconds=0.01)
            >>> Entry.of(Key("cpu", "forward", "avx2", "float32", 64, 10, "half"), found, {}).config
            {}
        """
        failures = tuple(Failure(dict(config), error) for config, error in found.failures)
        return cls(
            key,
            dict(found.best),
            installed_version(),
            dict(found.contender),
            found.default_times,
            found.contender_times,
            found.ratio,
            found.reason,
            found.tried,
            failures,
            problem,
            datetime.now(UTC).isoformat(timespec="seconds"),
        )

    @classmethod
    def from_json(cls, value: Any) -> Entry:
        """Read an entry of the cache.

        Args:
            value: Plain data, as `attnspan.bench` writes dataclasses.

        Raises:
            OptionError: It is something else.

        Example:
            >>> Entry.from_json({})  # doctest: +ELLIPSIS
            Traceback (most recent call last):
            attnspan.errors.OptionError: entry: expected the fields key, config, ...
        """
        return from_plain(cls, value, "entry")

    @property
    def accepted(self) -> bool:
        """Whether calls use something other than the default."""
        return any(self.config.values())

    @property
    def gain(self) -> TuningGain | None:
        """The record that tables and pages show; None where nothing was compared."""
        if self.default is None or self.tuned is None or self.ratio is None:
            return None
        key = {name: str(value) for name, value in vars(self.key).items()}
        times = self.tuned if self.accepted else self.default
        ratio = self.ratio if self.accepted else Ratio(1.0, 1.0, 1.0, self.ratio.pairs)
        config = self.config if self.accepted else {}
        return TuningGain(key, self.default, times, ratio, config, len(self.failures))

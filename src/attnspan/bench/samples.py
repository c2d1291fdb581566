"""Raw samples, their order statistics, and the paired ratio of two sides."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from attnspan.bench.statistics import bootstrap_ratio, quartiles

__all__ = ["Rate", "Ratio", "Samples", "Timing"]


@dataclass(frozen=True)
class Samples:
    """Raw samples of one figure, and their order statistics.

    Args:
        samples: One or more.

    Example:
        >>> Samples((1.0, 2.0, 3.0, 4.0, 5.0)).spread
        0.6666666666666666
    """

    samples: tuple[float, ...]

    @cached_property
    def quartiles(self) -> tuple[float, float, float]:
        """Lower quartile, median, upper quartile."""
        return quartiles(self.samples)

    @property
    def median(self) -> float:
        """The middle sample."""
        return self.quartiles[1]

    @property
    def spread(self) -> float:
        """Interquartile range over the median."""
        low, middle, high = self.quartiles
        return (high - low) / middle if middle else 0.0


@dataclass(frozen=True)
class Timing(Samples):
    """Seconds per call, one number per sample.

    Args:
        samples: Seconds per call.
        calls: Calls of each sample; more than one where a call is too short for the clock.

    Example:
        >>> Timing((0.5, 0.25, 0.75)).median
        0.5
    """

    calls: int = 1


@dataclass(frozen=True)
class Rate(Samples):
    """Something per second, one number per sample.

    Example:
        >>> Rate((100.0, 110.0)).median
        105.0
    """


@dataclass(frozen=True)
class Ratio:
    """Paired ratio of times, peer over ours: above 1, ours is faster.

    Args:
        median: Of the paired ratios.
        low: Lower end of the bootstrap interval of 95 %.
        high: Upper end.
        pairs: Number of pairs.

    Example:
        >>> Ratio.of([1.0, 2.0, 4.0], [2.0, 4.0, 8.0]).is_faster
        True
    """

    median: float
    low: float
    high: float
    pairs: int

    @classmethod
    def of(cls, ours: list[float] | tuple[float, ...], theirs: list[float] | tuple[float, ...]) -> Ratio:
        """The ratio of samples that were taken in turn.

        Args:
            ours: Seconds of ours.
            theirs: Seconds of the peer, in the same order.

        Example:
            >>> Ratio.of([1.0], [3.0]).median
            3.0
        """
        return cls(*bootstrap_ratio(ours, theirs), pairs=len(ours))

    @property
    def width(self) -> float:
        """Width of the interval over the median: what the noise leaves open."""
        return (self.high - self.low) / self.median if self.median else float("inf")

    @property
    def is_faster(self) -> bool:
        """Ours is faster beyond doubt: the whole interval is above 1."""
        return self.low > 1

    @property
    def is_slower(self) -> bool:
        """Ours is slower beyond doubt."""
        return self.high < 1

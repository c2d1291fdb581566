"""Medians with intervals from order statistics, and significance of many differences.

The interval of a median lies between two of the sorted samples. Its level follows from the binomial
distribution, for any distribution of the samples (David and Nagaraja, Order Statistics, 2003, section 7.1).
The level nearest to 95 % is 96.1 % for n = 9 samples, and 93.8 % for n = 5.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist

import numpy as np

from attnspan.errors import expect

__all__ = [
    "Interval",
    "Samples",
    "discoveries",
    "order_level",
    "paired",
    "quotient",
    "sign_test",
]

NOMINAL = 0.95
FALSE_DISCOVERIES = 0.05


@dataclass(frozen=True)
class Samples:
    """Raw samples of one quantity.

    Example:
        >>> Samples((1.0, 2.0, 3.0, 4.0, 5.0)).spread
        0.6666666666666666
    """

    samples: tuple[float, ...]

    @cached_property
    def quartiles(self) -> tuple[float, float, float]:
        """Lower quartile, median and upper quartile, interpolated."""
        expect(self.samples, "samples", "one or more", "none", "Measure at least one sample")
        low, middle, high = np.quantile(np.asarray(self.samples, np.float64), [0.25, 0.5, 0.75])
        return float(low), float(middle), float(high)

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
class Interval:
    """A median with its confidence interval.

    Args:
        median: Median of the samples.
        low: Lower end of the interval.
        high: Upper end of the interval.
        pairs: Number of samples.
        level: Probability that the interval holds the true median.
        p: Probability of samples at least as one-sided as these if the true median were 1.

    Example:
        >>> found = Interval.of([1.1, 1.2, 1.1, 1.3, 1.2, 1.2, 1.1, 1.2, 1.3])
        >>> found.median, found.low, found.high, round(found.level, 3), round(found.p, 4)
        (1.2, 1.1, 1.3, 0.961, 0.0039)
    """

    median: float
    low: float
    high: float
    pairs: int
    level: float = NOMINAL
    p: float = 1.0

    @classmethod
    def of(cls, samples: Sequence[float]) -> Interval:
        """Compute the interval of samples, such as the ratios of pairs."""
        ordered, middle = sorted(samples), Samples(tuple(samples)).median
        rank, level = order_level(len(ordered))
        low, high = ordered[rank], ordered[-1 - rank]
        return cls(middle, low, high, len(ordered), level, sign_test(samples))

    @property
    def width(self) -> float:
        """Width of the interval over the median."""
        return (self.high - self.low) / self.median if self.median else math.inf


def _tail(count: int, total: int) -> float:
    """P(X <= count) for X ~ Binomial(total, 1/2)."""
    return sum(math.comb(total, i) for i in range(count + 1)) / 2.0**total if count >= 0 else 0.0


def order_level(count: int) -> tuple[int, float]:
    """Choose the sorted samples that bound the median, and compute their confidence level.

    Args:
        count: Number of samples.

    Returns:
        The rank k of the lower end, from 0, and the level. The upper end has the rank count - 1 - k. k is the
        largest rank with a level of at least 95 %, or else 0. The level of one sample is 0.

    Example:
        >>> [(n, k, round(100 * level, 1)) for n in (5, 9, 25) for k, level in [order_level(n)]]
        [(5, 0, 93.8), (9, 1, 96.1), (25, 7, 95.7)]
    """
    rank = 0
    while rank + 1 < (count + 1) // 2 and 1 - 2 * _tail(rank + 1, count) >= NOMINAL:
        rank += 1
    return rank, max(0.0, 1 - 2 * _tail(rank, count))


def sign_test(samples: Sequence[float]) -> float:
    """Compute the two-sided p-value that the median is 1. Samples of exactly 1 support the hypothesis.

    Example:
        >>> sign_test([1.1] * 9), sign_test([0.9, 1.1]), sign_test([1.0] * 13 + [1.1] * 12)
        (0.00390625, 1.0, 1.0)
    """
    most = max(sum(x > 1 for x in samples), sum(x < 1 for x in samples))
    return min(1.0, 2 * _tail(len(samples) - most, len(samples)))


def paired(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """Compute the ratio theirs / ours of paired samples. Noise of the machine affects both samples of a pair.

    Raises:
        OptionError: The two sides have different lengths, or are empty.

    Example:
        >>> paired([1.0, 2.0, 4.0], [2.0, 4.0, 8.0]).median
        2.0
    """
    got, wanted = str(len(theirs)), "as many of theirs as of ours, {}"
    expect(len(ours) == len(theirs), "paired samples", wanted, got, "Sample the two in turn", len(ours))
    return Interval.of([b / a for a, b in zip(ours, theirs, strict=True)])


def quotient(old: Interval, new: Interval) -> Interval:
    """Compute new / old of two independent measurements. Their errors add on a logarithmic scale.

    The 95 % interval and the p-value assume that the logarithm of each median is normally distributed. Its
    standard error follows from its own interval.

    Example:
        >>> found = quotient(Interval(2.0, 1.98, 2.02, 9), Interval(3.0, 2.97, 3.03, 9))
        >>> found.median, found.low > 1
        (1.5, True)
    """
    normal = NormalDist()

    def error(one: Interval) -> float:
        reach = normal.inv_cdf((1 + min(max(one.level, 0.5), 0.9999)) / 2)
        return math.log(one.high / one.low) / 2 / reach

    middle, size = math.log(new.median / old.median), math.hypot(error(old), error(new))
    reach = normal.inv_cdf((1 + NOMINAL) / 2) * size
    p = 2 * normal.cdf(-abs(middle) / size) if size else float(middle == 0)
    ends = (math.exp(middle - reach), math.exp(middle + reach))
    return Interval(math.exp(middle), *ends, min(old.pairs, new.pairs), NOMINAL, p)


def discoveries(p_values: Sequence[float]) -> list[bool]:
    """Find the significant differences, by Benjamini and Hochberg's procedure (JRSS B 57, 1995).

    On average, at most 5 % of the reported differences are false.

    Args:
        p_values: One p-value for each comparison of a table.

    Example:
        >>> discoveries([0.004, 0.004, 0.04]), discoveries([0.004] + [0.9] * 99).count(True)
        ([True, True, True], 0)
    """
    count = len(p_values)
    passing = [p for i, p in enumerate(sorted(p_values), 1) if p <= FALSE_DISCOVERIES * i / count]
    limit = max(passing, default=-1.0)
    return [p <= limit for p in p_values]

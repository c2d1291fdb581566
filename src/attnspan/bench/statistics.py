"""Order statistics of raw samples, and how sure one may be of a ratio."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from attnspan.errors import OptionError

__all__ = ["bootstrap_medians", "bootstrap_ratio", "quartiles"]

_CONFIDENCE = 0.95
_RESAMPLES = 2000


def quartiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile, interpolated.

    Args:
        samples: One or more numbers.

    Raises:
        OptionError: There is no sample.

    Example:
        >>> quartiles([1.0, 2.0, 3.0, 4.0, 5.0])
        (2.0, 3.0, 4.0)
    """
    if len(samples) == 0:
        raise OptionError(
            "samples", expected="one or more", got="none", remedy="Measure before asking for figures"
        )
    low, middle, high = np.quantile(np.asarray(samples, np.float64), [0.25, 0.5, 0.75])
    return float(low), float(middle), float(high)


def bootstrap_ratio(
    ours: Sequence[float], theirs: Sequence[float], *, resamples: int = _RESAMPLES, seed: int = 0
) -> tuple[float, float, float]:
    """Median of the paired ratios theirs / ours, and its percentile bootstrap interval of 95 %.

    Neighbouring samples share the machine's state, so drift cancels in each pair. Pairs are resampled as
    wholes (Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13).

    Args:
        ours: Seconds, sample by sample.
        theirs: Seconds of the other side, each taken next to its partner.
        resamples: Bootstrap resamples.
        seed: Seed of the resampling: the same samples give the same interval.

    Returns:
        (median, low, high).

    Raises:
        OptionError: The two sides differ in number, or are empty.

    Example:
        >>> bootstrap_ratio([1.0, 2.0, 4.0], [2.0, 4.0, 8.0])
        (2.0, 2.0, 2.0)
    """
    if len(ours) != len(theirs):
        raise OptionError(
            "paired samples",
            expected=f"as many of theirs as of ours, {len(ours)}",
            got=str(len(theirs)),
            remedy="Sample the two in turn",
        )
    ratios = np.asarray(theirs, np.float64) / np.asarray(ours, np.float64)
    middle = quartiles(ratios.tolist())[1]
    low, high = _interval(_medians(ratios, resamples, np.random.default_rng(seed)))
    return middle, low, high


def bootstrap_medians(
    before: Sequence[float], after: Sequence[float], *, resamples: int = _RESAMPLES, seed: int = 0
) -> tuple[float, float, float]:
    """Ratio of medians after / before of two independent sets of samples, with its interval of 95 %.

    Args:
        before: Samples of one measurement.
        after: Samples of another; the number may differ.
        resamples: Bootstrap resamples of each.
        seed: Seed of the resampling.

    Returns:
        (ratio, low, high).

    Raises:
        OptionError: One of them is empty.

    Example:
        >>> bootstrap_medians([2.0, 2.0, 2.0], [3.0, 3.0])
        (1.5, 1.5, 1.5)
    """
    ratio = quartiles(after)[1] / quartiles(before)[1]
    rng = np.random.default_rng(seed)
    old = _medians(np.asarray(before, np.float64), resamples, rng)
    new = _medians(np.asarray(after, np.float64), resamples, rng)
    low, high = _interval(new / old)
    return ratio, low, high


def _medians(values: np.ndarray, resamples: int, rng: np.random.Generator) -> np.ndarray:
    """Median of each resample, (resamples,)."""
    drawn: np.ndarray = np.median(values[rng.integers(len(values), size=(resamples, len(values)))], axis=1)
    return drawn


def _interval(values: np.ndarray) -> tuple[float, float]:
    tail = (1 - _CONFIDENCE) / 2
    low, high = np.quantile(values, [tail, 1 - tail])
    return float(low), float(high)

"""Intervals hold what they promise on samples whose truth is known."""

import numpy as np
import pytest
from attnspan.tools.bench.samples import Ratio, Samples

from attnspan.errors import OptionError
from attnspan.tools.bench.statistics import bootstrap_medians, bootstrap_ratio, quartiles


def _pairs(rng, count, ratio, noise, drift):
    """Both sides share a drift of the machine; each has noise of its own."""
    machine = np.exp(drift * np.cumsum(rng.standard_normal(count)))
    ours = machine * np.exp(noise * rng.standard_normal(count))
    return ours, ratio * machine * np.exp(noise * rng.standard_normal(count))


def test_a_known_ratio_is_recovered_through_drift():
    ours, theirs = _pairs(np.random.default_rng(0), 60, ratio=1.37, noise=0.02, drift=0.2)
    assert max(ours) / min(ours) > 2, "the machine must drift far more than the interval is wide"
    ratio, low, high = bootstrap_ratio(ours, theirs)
    assert low < 1.37 < high
    assert ratio == pytest.approx(1.37, rel=0.02)
    assert (high - low) / ratio < 0.05


@pytest.mark.parametrize("count", [8, 30])
def test_the_interval_of_a_ratio_covers_the_truth_as_often_as_it_says(count):
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(200):
        _, low, high = bootstrap_ratio(*_pairs(rng, count, 2.0, 0.1, 0.0), resamples=400)
        covered += low <= 2.0 <= high
    assert 0.89 <= covered / 200 <= 0.995


def test_the_interval_of_independent_medians_covers_the_truth():
    rng = np.random.default_rng(2)
    covered = 0
    for _ in range(200):
        old, new = (np.exp(0.1 * rng.standard_normal(20)) * scale for scale in (1.0, 1.5))
        _, low, high = bootstrap_medians(old, new, resamples=400)
        covered += low <= 1.5 <= high
    assert 0.89 <= covered / 200 <= 0.995


def test_more_noise_leaves_more_open():
    rng = np.random.default_rng(3)
    quiet, loud = (Ratio.of(*map(tuple, _pairs(rng, 40, 1.0, noise, 0.0))) for noise in (0.01, 0.2))
    assert quiet.width < 0.02 < 0.05 < loud.width


def test_the_same_samples_give_the_same_interval():
    ours, theirs = _pairs(np.random.default_rng(4), 12, 1.1, 0.1, 0.0)
    assert bootstrap_ratio(ours, theirs) == bootstrap_ratio(ours, theirs)


def test_samples_that_were_not_taken_in_turn_are_refused():
    with pytest.raises(OptionError, match="expected as many of theirs as of ours, 2, got 1"):
        bootstrap_ratio([1.0, 2.0], [1.0])


def test_figures_of_no_samples_are_refused():
    with pytest.raises(OptionError, match="expected one or more, got none"):
        quartiles([])


def test_one_outlier_moves_neither_median_nor_spread():
    calm, struck = Samples((1.0, 1.1, 0.9, 1.0, 1.05)), Samples((1.0, 1.1, 0.9, 1.0, 50.0))
    assert struck.median == calm.median
    assert struck.spread < 0.2

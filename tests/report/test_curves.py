import math

import numpy as np
import pytest

from halfword.report.curves import is_drawable, smooth, thinned
from halfword.report.history import History


def history(losses, first=0):
    losses = np.array(losses, dtype=np.float64)
    return History(np.arange(first, first + len(losses)), losses, None, None, None, torn=False)


def test_smoothing_weighs_both_sides_by_distance():
    values = np.array([1.0, 2.0, 4.0])
    half, quarter = 0.5, 0.25  # span 3 halves the weight with each step
    expected = [
        (1 + half * 2 + quarter * 4) / (1 + half + quarter),
        (half * 1 + 2 + half * 4) / (half + 1 + half),
        (quarter * 1 + half * 2 + 4) / (quarter + half + 1),
    ]
    assert smooth(values, span=3) == pytest.approx(expected)


def test_smoothing_over_one_step_or_of_a_constant_changes_nothing():
    values = np.array([3.0, 1.0, 2.0])
    assert smooth(values, span=1).tolist() == values.tolist()
    assert smooth(np.full(50, 0.7), span=9) == pytest.approx(0.7)


def test_smoothing_carries_nothing_across_a_gap():
    values = np.array([9.0, 9.0, math.nan, 1.0, 1.0])
    np.testing.assert_allclose(smooth(values, span=5), values)


def test_few_steps_are_all_drawn():
    steps = thinned([history([1.0] * 10), history([2.0] * 10, first=5)], limit=15)
    assert steps.tolist() == list(range(15))


def test_of_many_steps_extremes_gaps_and_ends_of_every_run_are_drawn():
    generator = np.random.default_rng(0)
    noisy = [generator.normal(2.0, 0.1, 10_000) for _ in range(3)]
    noisy[0][1234], noisy[1][5678], noisy[2][9001] = 9.0, -9.0, math.nan
    noisy[2][:2] = 0.0  # the last run begins at step 2
    runs = [history(noisy[0]), history(noisy[1]), history(noisy[2][2:], first=2)]
    steps = thinned(runs, limit=300)
    assert len(steps) <= 300 + 7 and np.all(np.diff(steps) > 0)
    assert {0, 2, 1234, 5678, 9001, 9999} <= set(steps.tolist())


def test_each_stretch_keeps_the_lowest_and_the_highest_loss():
    losses = np.random.default_rng(0).normal(size=1000)
    steps = thinned([history(losses)], limit=100)
    for stretch in np.split(np.arange(1000), 50):
        kept = np.intersect1d(steps, stretch)
        assert losses[kept].min() == losses[stretch].min()
        assert losses[kept].max() == losses[stretch].max()


def test_what_fp32_cannot_hold_is_not_drawable():
    values = np.array([0.0, -3e38, 1e39, math.inf, math.nan])
    assert is_drawable(values).tolist() == [True, True, False, False, False]

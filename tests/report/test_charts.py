import json
import math

import numpy as np
import pytest

from halfword.report.charts import charts, loss_curves, memory_bars, time_distribution

LOSSES = [4.0, 3.0, 2.5, 2.25]


def test_losses_keep_all_digits_and_differences_are_to_the_first_run(write_run, compared):
    other = [loss + 0.1 for loss in LOSSES]
    curves = loss_curves(compared(write_run("a", LOSSES), write_run("b", other)))
    a, b = curves["runs"]
    assert (curves["steps"], curves["num_steps"], curves["span"]) == ([0, 1, 2, 3], 4, 1)
    assert (a["loss"], b["loss"]) == (LOSSES, other)
    assert a["difference"] == [0.0] * 4
    assert b["difference"] == [x - y for x, y in zip(other, LOSSES, strict=True)]
    assert b["smoothed"] == pytest.approx(other)  # the span is one step


def test_a_missing_step_is_null_and_a_loss_that_is_not_finite_is_text(write_run, compared):
    paths = [write_run("a", LOSSES), write_run("b", [4.0, math.nan, math.inf])]
    _, b = loss_curves(compared(*paths))["runs"]
    assert b["loss"] == [4.0, "nan", "inf", None]
    assert b["difference"] == [0.0, "nan", "inf", None]
    assert b["gaps"] == [(1, 2)]


def test_equal_curves_are_named(write_run, compared):
    paths = [write_run("a", LOSSES), write_run("b", LOSSES), write_run("c", [1.0] * 4)]
    runs = loss_curves(compared(*paths))["runs"]
    assert [run["equals"] for run in runs] == [None, "a", None]


def test_memory_is_stacked_by_component_and_may_be_missing(write_run, write_csv, compared):
    paths = [write_run("a", LOSSES, sizes=(2, 4, 8, 2)), write_csv("plain.csv", LOSSES)]
    bars = memory_bars(compared(*paths))
    assert bars["labels"] == ["a", "plain"]
    assert bars["components"] == ["weights", "master weights", "moments", "gradients"]
    assert bars["bytes"] == [[2.0, 4.0, 8.0, 2.0], None]
    assert bars["totals"] == [16.004, None]


def test_step_times_are_shares_of_the_steps_after_warm_up(write_run, compared):
    times = [9.0, 9.0] + [0.1] * 50 + [0.2] * 48 + [5.0]  # the default leaves two steps out
    path = write_run("a", [1.0] * 101, step_s=times)
    distribution = time_distribution(compared(path, path))
    edges, shares = np.array(distribution["edges"]), distribution["runs"][0]["shares"]
    assert len(shares) == len(edges) == 41
    assert edges[0] == pytest.approx(100.0) and np.allclose(np.diff(np.log(edges), 2), 0)
    assert sum(shares) == pytest.approx(100, abs=0.05)
    assert shares[0] == pytest.approx(100 * 50 / 99, abs=1e-3)
    assert shares[-1] == pytest.approx(100 * 1 / 99, abs=1e-3)  # beyond the last edge


def test_equal_times_have_bins_and_no_times_have_none(write_run, write_csv, compared):
    path = write_run("a", LOSSES)
    assert sum(time_distribution(compared(path, path))["runs"][0]["shares"]) == 100
    paths = [write_csv("a.csv", LOSSES), write_csv("b.csv", LOSSES)]
    assert time_distribution(compared(*paths)) is None


def test_everything_is_strict_json(write_run, compared):
    paths = [write_run("a", [math.nan] * 4), write_run("b", [1e308, -1e308, math.inf, 0.0])]
    json.dumps(charts(compared(*paths)), allow_nan=False)

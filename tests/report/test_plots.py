import math

import numpy as np
import pytest

from halfword.report.plots import draw_loss, draw_memory

LOSSES = [4.0, 3.0, 2.5, 2.25, 2.0, 1.75]
RAW, SMOOTHED = 0, 1


def curves(axes):
    """Raw and smoothed curve of each run, without the marks of gaps."""
    lines = [line for line in axes.lines if line.get_marker() != "x"]
    return list(zip(lines[::2], lines[1::2], strict=True))


def marks(axes):
    return [line for line in axes.lines if line.get_marker() == "x"]


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_a_nan_is_a_gap_with_a_mark_and_is_never_bridged(write_run, compared):
    poisoned = [4.0, 3.0, 2.5, math.nan, 2.0, 1.75]
    figure = draw_loss(compared(write_run("a", LOSSES), write_run("b", poisoned)))
    losses, differences = figure.axes
    for axes in (losses, differences):
        for curve in curves(axes)[1]:
            assert curve.get_xdata().tolist() == [0, 1, 2, 3, 4, 5]
            assert np.isnan(curve.get_ydata()).tolist() == [False] * 3 + [True] + [False] * 2
    assert curves(losses)[1][RAW].get_ydata()[[2, 4]].tolist() == [2.5, 2.0]
    (mark,) = marks(losses)
    assert list(mark.get_xdata()) == [3, 3]
    assert mark.get_color() == curves(losses)[1][SMOOTHED].get_color()
    assert legend(figure) == ["a", "b", "loss is NaN or Inf"]


@pytest.mark.parametrize(
    "losses",
    [
        [math.nan] * 6,
        [math.inf] * 6,
        [4.0, math.inf, -math.inf, math.nan, 2.0, 1.0],
        [3e38, -3e38, 1e308, -1e308, 1.0, 1.0],
    ],
)
def test_axis_limits_are_finite_whatever_the_losses(write_run, compared, losses, tmp_path):
    figure = draw_loss(compared(write_run("a", LOSSES), write_run("b", losses)))
    figure.savefig(tmp_path / "loss.png", dpi=40)
    for axes in figure.axes:
        assert np.isfinite([*axes.get_xlim(), *axes.get_ylim()]).all()


def test_a_value_between_two_gaps_is_a_dot(write_run, compared):
    alone = [4.0, math.nan, 2.5, math.nan, 2.0, 1.75]
    losses, _ = draw_loss(compared(write_run("a", LOSSES), write_run("b", alone))).axes
    for curve in curves(losses)[1]:
        assert (curve.get_marker(), curve.get_markevery()) == (".", [0, 2])


def test_equal_curves_share_the_line_in_dashes(write_run, compared):
    other = [loss + 1 for loss in LOSSES]
    paths = [write_run("a", LOSSES), write_run("b", LOSSES), write_run("c", other)]
    figure = draw_loss(compared(*paths))
    losses, _ = figure.axes
    a, b, c = (pair[SMOOTHED] for pair in curves(losses))
    assert not a.is_dashed() and b.is_dashed() and not c.is_dashed()
    assert a.get_linewidth() == b.get_linewidth() > c.get_linewidth()
    assert len({line.get_color() for line in (a, b, c)}) == 3
    assert c.get_zorder() > b.get_zorder() == a.get_zorder()
    assert legend(figure) == ["a", "b (= a)", "c"]


def test_the_lower_plot_shows_differences_over_the_common_steps(write_run, compared):
    paths = [write_run("a", LOSSES), write_run("b", [loss + 1 for loss in LOSSES[:4]])]
    _, differences = draw_loss(compared(*paths)).axes
    (first, _), (second, _) = curves(differences)
    assert first.get_ydata().tolist() == [0.0] * 4
    assert second.get_ydata().tolist() == [1.0] * 4


def test_axes_are_labelled_with_units_and_the_smoothing_is_stated(write_run, compared):
    path = write_run("a", LOSSES * 20)
    figure = draw_loss(compared(path, path))
    losses, differences = figure.axes
    assert losses.get_ylabel() == "training loss (nats per token)"
    assert differences.get_xlabel() == "step"
    assert "exponentially (span 3 steps, 1/40 of the run)" in figure.get_supxlabel()
    assert "never across a gap" in figure.get_supxlabel()


def test_memory_bars_are_stacked_and_their_totals_written(write_run, write_csv, compared):
    paths = [
        write_run("fp32-master", LOSSES, sizes=(2, 4, 8, 2)),
        write_run("leanest", LOSSES, sizes=(2, 1, 2.5, 0)),
        write_csv("plain.csv", LOSSES),
    ]
    (axes,) = draw_memory(compared(*paths)).axes
    bars = [patch for patch in axes.patches if patch.get_x() < 0.5]
    assert [(bar.get_y(), bar.get_height()) for bar in bars] == [(0, 2), (2, 4), (6, 8), (14, 2)]
    texts = [text.get_text() for text in axes.texts]
    assert texts[-3:] == ["16.0", "5.5", "not recorded"]
    assert axes.get_ylabel() == "bytes per parameter"
    entries = [text.get_text() for text in axes.get_legend().get_texts()]
    assert entries == ["gradients", "moments", "master weights", "weights"]


def test_runs_without_memory_still_have_a_plot(write_csv, compared, tmp_path):
    paths = [write_csv("a.csv", LOSSES), write_csv("b.csv", LOSSES)]
    draw_memory(compared(*paths)).savefig(tmp_path / "memory.png", dpi=40)


def test_names_are_not_read_as_formulas(write_run, compared, tmp_path):
    comparison = compared(write_run("_$a_$", LOSSES), write_run("$^$", LOSSES))
    figure = draw_loss(comparison)
    figure.savefig(tmp_path / "loss.png", dpi=40)
    draw_memory(comparison).savefig(tmp_path / "memory.png", dpi=40)
    assert legend(figure) == ["_$a_$", "$^$ (= _$a_$)"]

"""The two plots: losses by step with their differences, and memory as stacked bars.

Figures are made without pyplot, which keeps a global list of them and may look for a display.
"""

import textwrap
from itertools import cycle
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from halfword.report.comparison import Comparison
from halfword.report.curves import SMOOTHED_PART, is_drawable, smooth, smoothing_span
from halfword.report.history import spans
from halfword.report.tables import component_title, components

# Okabe and Ito's colours, which the colour-blind can tell apart.
RUN_COLOURS = ["#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000"]
# For a component, and for the number written on it.
COMPONENT_COLOURS = [
    ("#0072B2", "white"), ("#56B4E9", "black"), ("#E69F00", "black"), ("#C8C8C8", "black"),
    ("#009E73", "white"), ("#CC79A7", "black"),
]  # fmt: skip
INK, QUIET_INK, GRID = "#222222", "#666666", "#E6E6E6"
WIDTH_INCHES, DOTS_PER_INCH = 8.0, 150  # 1200 pixels: sharp where a README shows 800
DASH_LENGTH = 2.0  # in line widths


def draw_loss(comparison: Comparison) -> Figure:
    """Losses above, their differences to the first run below; raw faint, smoothed strong."""
    figure = Figure((WIDTH_INCHES, 6.0), DOTS_PER_INCH, layout="constrained")
    losses, differences = figure.subplots(2, 1, sharex=True, height_ratios=[5, 3])
    span = smoothing_span(comparison)
    first_loss = comparison.runs[0].history.loss_at(comparison.steps)
    styles = _styles(comparison)
    mark_height = 0.04  # of the axes
    for run, style in zip(comparison.runs, styles, strict=True):
        history = run.history
        _draw_curve(losses, history.steps, history.loss, span, style)
        gaps = spans(history.steps[~is_drawable(history.loss)], among=history.steps)
        for gap in gaps:
            _mark_gap(losses, gap, mark_height, style["color"])
        mark_height += 0.05 * bool(gaps)
        with np.errstate(invalid="ignore", over="ignore"):
            difference = history.loss_at(comparison.steps) - first_loss
        _draw_curve(differences, comparison.steps, difference, span, style)
    dress(losses, "training loss (nats per token)")
    dress(differences, f"loss minus that of\n{comparison.runs[0].label}")
    differences.set_xlabel("step", color=INK)
    differences.margins(x=0.01)
    differences.xaxis.set_major_locator(MaxNLocator(integer=True))
    _add_run_legend(figure, comparison, styles)
    figure.supxlabel(
        "Faint: every step. Strong: mean of the steps around, weights falling exponentially"
        f" (span {span} steps, 1/{SMOOTHED_PART} of the run), never across a gap.",
        fontsize=8,
        color=QUIET_INK,
    )
    return figure


def draw_memory(comparison: Comparison) -> Figure:
    """Bytes a parameter at the entry of `step()`: one bar a run, its total above."""
    figure = Figure((WIDTH_INCHES, 4.5), DOTS_PER_INCH, layout="constrained")
    axes = figure.subplots()
    measured = [statistics.bytes_per_parameter or {} for statistics in comparison.statistics]
    totals = [sizes.get("total", 0.0) for sizes in measured]
    scale = max(totals) or 1.0
    floors = np.zeros(len(measured))
    for component, (colour, ink) in zip(components(comparison), cycle(COMPONENT_COLOURS)):
        heights = np.array([sizes.get(component, 0.0) for sizes in measured])
        bars = axes.bar(
            np.arange(len(heights)), heights, 0.6, floors,
            color=colour, edgecolor="white", label=component_title(component),
        )  # fmt: skip
        numbers = [f"{height:.1f}" if height > 0.04 * scale else "" for height in heights]
        axes.bar_label(bars, numbers, label_type="center", color=ink, fontsize=9)
        floors += heights
    for x, (total, sizes) in enumerate(zip(totals, measured, strict=True)):
        text = f"{total:.1f}" if sizes else "not recorded"
        weight = "bold" if sizes else "normal"
        axes.text(x, total + 0.015 * scale, text, ha="center", weight=weight, color=INK)
    names = [textwrap.fill(run.label, max(10, 64 // len(totals))) for run in comparison.runs]
    axes.set_xticks(range(len(names)), names, parse_math=False)
    axes.set_ylim(0, 1.1 * scale)
    dress(axes, "bytes per parameter")
    axes.grid(visible=False, axis="x")
    # Read from top to bottom as the bars are stacked.
    axes.legend(
        loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, reverse=True, labelcolor=INK
    )
    return figure


def dress(axes: Axes, y_label: str) -> None:
    """Give axes the look of all plots here."""
    axes.set_ylabel(y_label, color=INK, parse_math=False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(QUIET_INK)
    axes.tick_params(colors=INK, labelsize=9)
    axes.set_axisbelow(True)
    axes.grid(color=GRID, linewidth=0.8)


def _draw_curve(
    axes: Axes,
    steps: NDArray[np.int64],
    values: NDArray[np.float64],
    span: int,
    style: dict[str, Any],
) -> None:
    drawable = is_drawable(values)
    # NaN breaks the line. A value between two gaps would leave no ink: it gets a dot.
    gapped = np.where(drawable, values, np.nan)
    beside = np.concatenate([[False], drawable, [False]])
    alone = np.flatnonzero(drawable & ~beside[:-2] & ~beside[2:]).tolist()
    dots: dict[str, Any] = {"marker": ".", "markevery": alone}
    axes.plot(steps, gapped, color=style["color"], alpha=0.25, linewidth=0.8, **dots)
    axes.plot(steps, smooth(values, span), **style, **dots)


def _styles(comparison: Comparison) -> list[dict[str, Any]]:
    """A line for each run such that none hides another, however close they are.

    Runs with equal losses share one line, in dashes of all their colours; lines that differ lie
    upon each other from wide to narrow.
    """
    originals = [comparison.twins(index)[0] for index in range(len(comparison.runs))]
    distinct = sorted(set(originals))
    styles = []
    for index, original in enumerate(originals):
        layer = distinct.index(original)
        style: dict[str, Any] = {
            "color": RUN_COLOURS[index % len(RUN_COLOURS)],
            "linewidth": min(4.5, 1.5 + 1.0 * (len(distinct) - 1 - layer)),
            "zorder": 2 + layer / len(distinct),
        }
        if index != original:
            twins = comparison.twins(index)
            gap = DASH_LENGTH * (len(twins) - 1)
            style["linestyle"] = (-DASH_LENGTH * twins.index(index), (DASH_LENGTH, gap))
            style["dash_capstyle"] = "butt"
        styles.append(style)
    return styles


def _mark_gap(axes: Axes, gap: tuple[int, int], height: float, colour: str) -> None:
    """A cross at the first and the last step without a finite loss, and a line between."""
    axes.plot(
        gap, (height, height), transform=axes.get_xaxis_transform(),
        color=colour, marker="x", markeredgewidth=2, linewidth=1,
    )  # fmt: skip


def _add_run_legend(figure: Figure, comparison: Comparison, styles: list[dict[str, Any]]) -> None:
    """Above the plots, where no curve can run through it."""
    handles = []
    for index, (run, style) in enumerate(zip(comparison.runs, styles, strict=True)):
        original = comparison.twins(index)[0]
        same = "" if original == index else f" (= {comparison.runs[original].label})"
        handles.append(Line2D([], [], label=run.label + same, **style))
    if not all(is_drawable(run.history.loss).all() for run in comparison.runs):
        cross = Line2D([], [], color=QUIET_INK, marker="x", markeredgewidth=2, linestyle="none")
        cross.set_label("loss is NaN or Inf")
        handles.append(cross)
    # In characters, with those that a line and its distance take; about a hundred fit in a row.
    widths = [len(str(handle.get_label())) + 10 for handle in handles]
    num_columns = len(widths) if sum(widths) <= 100 else max(1, 100 // max(widths))
    legend = figure.legend(
        handles=handles, loc="outside upper center", ncols=num_columns,
        frameon=False, labelcolor=INK, handlelength=3.5, fontsize=9,
    )  # fmt: skip
    for text in legend.get_texts():
        text.set_parse_math(False)

"""The data that the page draws: loss curves, memory and step times, as JSON values."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from halfword.report.comparison import Comparison
from halfword.report.curves import is_drawable, smooth, smoothing_span, thinned
from halfword.report.history import spans
from halfword.report.runs import Run
from halfword.report.tables import component_title, components

DRAWN_STEPS = 8000  # several times the columns of a screen, so that zooming in shows more
MARKED_GAPS = 50  # of one run
NUM_BINS = 40
SMOOTHED_DIGITS = 7  # raw losses keep all


def charts(comparison: Comparison) -> dict[str, Any]:
    """All of the page's data, by chart."""
    return {
        "loss": loss_curves(comparison),
        "memory": memory_bars(comparison),
        "time": time_distribution(comparison),
    }


def loss_curves(comparison: Comparison) -> dict[str, Any]:
    """Raw and smoothed losses and differences to the first run, all at the same steps.

    A loss is null where a run has no such step, and text where it is not finite. `steps` may be
    a part of all, see `thinned`; `num_steps` counts all.
    """
    histories = [run.history for run in comparison.runs]
    steps = thinned(histories, DRAWN_STEPS)
    span = smoothing_span(comparison)
    return {
        "steps": steps.tolist(),
        "span": span,
        "num_steps": len(np.unique(np.concatenate([history.steps for history in histories]))),
        "runs": [_curves(comparison, index, steps, span) for index in range(len(histories))],
    }


def memory_bars(comparison: Comparison) -> dict[str, Any]:
    """Bytes a parameter at the entry of `step()`; null for a run that did not record them."""
    names = components(comparison)
    measured = [statistics.bytes_per_parameter for statistics in comparison.statistics]
    return {
        "labels": [run.label for run in comparison.runs],
        "components": [component_title(name) for name in names],
        "bytes": [
            [sizes.get(name, 0.0) for name in names] if sizes else None for sizes in measured
        ],
        "totals": [sizes["total"] if sizes else None for sizes in measured],
    }


def time_distribution(comparison: Comparison) -> dict[str, Any] | None:
    """The share of steps, in percent, that took so long; None if no run recorded times.

    The bins grow by a constant factor. The last one holds the slowest percent, whatever they took.
    """
    times = {run.label: step_ms(run, comparison.warmup_steps) for run in comparison.runs}
    times = {label: values for label, values in times.items() if len(values)}
    if not times:
        return None
    lowest = min(float(values.min()) for values in times.values())
    highest = max(float(np.percentile(values, 99)) for values in times.values())
    edges = np.geomspace(lowest, max(highest, 1.01 * lowest), NUM_BINS + 1)
    return {
        "edges": edges.tolist(),
        "runs": [{"label": label, "shares": _shares(v, edges)} for label, v in times.items()],
    }


def step_ms(run: Run, warmup_steps: int) -> NDArray[np.float64]:
    """The times of a run's steps after warm-up; empty if it recorded none."""
    history = run.history
    if history.step_s is None:
        return np.empty(0)
    values = 1e3 * history.step_s[history.steps >= warmup_steps]
    return values[np.isfinite(values) & (values > 0)]


def _curves(
    comparison: Comparison, index: int, steps: NDArray[np.int64], span: int
) -> dict[str, Any]:
    run = comparison.runs[index]
    history, common = run.history, comparison.steps
    first_loss = comparison.runs[0].history.loss_at(common)
    with np.errstate(invalid="ignore", over="ignore"):
        difference = history.loss_at(common) - first_loss
    gaps = spans(history.steps[~is_drawable(history.loss)], among=history.steps)
    original = comparison.twins(index)[0]
    return {
        "label": run.label,
        "equals": None if original == index else comparison.runs[original].label,
        "loss": _at(steps, history.steps, history.loss),
        "smoothed": _rounded(_at(steps, history.steps, smooth(history.loss, span))),
        "difference": _at(steps, common, difference),
        "smoothed_difference": _rounded(_at(steps, common, smooth(difference, span))),
        "gaps": gaps[:MARKED_GAPS],
    }


def _at(
    steps: NDArray[np.int64], own_steps: NDArray[np.int64], values: NDArray[np.float64]
) -> list[float | str | None]:
    _, places, rows = np.intersect1d(steps, own_steps, return_indices=True)
    at: list[float | str | None] = [None] * len(steps)
    values = values[rows]
    for place, value, finite in zip(
        places.tolist(), values.tolist(), is_drawable(values).tolist(), strict=True
    ):
        at[place] = value if finite else str(value)
    return at


def _rounded(values: list[float | str | None]) -> list[float | str | None]:
    return [
        float(f"{value:.{SMOOTHED_DIGITS}g}") if isinstance(value, float) else value
        for value in values
    ]


def _shares(values: NDArray[np.float64], edges: NDArray[np.float64]) -> list[float]:
    bins = np.searchsorted(edges, values, side="right") - 1
    counts = np.bincount(bins.clip(0, NUM_BINS), minlength=NUM_BINS + 1)
    return [round(100 * count / len(values), 3) for count in counts.tolist()]

"""What is drawn of losses: their smoothed course, and a part of the steps where there are many."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from halfword.report.comparison import Comparison
from halfword.report.history import History

SMOOTHED_PART = 40  # the span of the smoothing is one such part of the longest run's steps


def smoothing_span(comparison: Comparison) -> int:
    """The span, in steps, with which the losses of a comparison are smoothed."""
    longest = max(len(run.history.steps) for run in comparison.runs)
    return max(1, round(longest / SMOOTHED_PART))


def smooth(values: NDArray[np.float64], span: int) -> NDArray[np.float64]:
    """Mean of the values around each one, their weights falling exponentially with distance.

    A gap stays a gap, and nothing on one side of it has weight on the other. From one side only,
    the curve would trail a falling loss by `span / 2` steps.
    """
    before, weight_before = _decaying_sums(values, span)
    after, weight_after = (sums[::-1] for sums in _decaying_sums(values[::-1], span))
    # Both sums hold the value itself, with weight 1. Dividing by the weights corrects the bias.
    return (before + after - values) / (weight_before + weight_after - 1)


def _decaying_sums(
    values: NDArray[np.float64], span: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    decay = 1 - 2 / (span + 1)
    sums: list[float] = []
    weights: list[float] = []
    total = weight = 0.0
    for value, drawable in zip(values.tolist(), is_drawable(values).tolist(), strict=True):
        total = decay * total + value if drawable else 0.0
        weight = decay * weight + 1 if drawable else 0.0
        sums.append(total if drawable else math.nan)
        weights.append(weight)
    return np.array(sums), np.array(weights)


def is_drawable(values: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Not NaN and not Inf in FP32, which a loss is; beyond it, axis limits would overflow."""
    return np.abs(values) <= np.finfo(np.float32).max


def thinned(histories: Sequence[History], limit: int) -> NDArray[np.int64]:
    """The steps to draw of several runs: all, or about `limit` that keep each curve's outline.

    Of each stretch of steps each run keeps those of its lowest and its highest loss, and the first
    without a finite one: a spike or a gap of a single step stays to be seen.
    """
    steps = np.unique(np.concatenate([history.steps for history in histories]))
    if len(steps) <= limit:
        return steps
    kept = [step for history in histories for step in (history.steps[0], history.steps[-1])]
    for stretch in np.array_split(steps, max(1, limit // (2 * len(histories)))):
        for history in histories:
            kept += _outline(history, stretch[0], stretch[-1])
    return np.unique(np.array(kept))


def _outline(history: History, first: np.int64, last: np.int64) -> list[np.int64]:
    rows = slice(*np.searchsorted(history.steps, [first, last + 1]))
    steps, loss = history.steps[rows], history.loss[rows]
    finite = is_drawable(loss)
    kept = list(steps[~finite][:1])
    if finite.any():
        kept += [steps[finite][loss[finite].argmin()], steps[finite][loss[finite].argmax()]]
    return kept

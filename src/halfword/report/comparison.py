"""Runs joined by step: statistics, verdicts on equality, caveats, and the one sentence."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from halfword.errors import UsageError
from halfword.report.caveats import caveats
from halfword.report.equality import Verdict, judge
from halfword.report.runs import DEFAULT_WARMUP_STEPS, Run


@dataclass(frozen=True)
class Statistics:
    """One run in numbers, over the steps common to all; `None` is what it did not record."""

    final_loss: float
    mean_loss: float  # NaN or Inf if any loss is: an average that leaves them out would hide them
    loss_std: float  # of the population
    eval_loss: float | None  # the run's last evaluation
    eval_step: int | None
    step_s_median: float | None  # after warm-up
    optimizer_s_median: float | None
    bytes_per_parameter: dict[str, float] | None  # by component, and "total", at step entry


@dataclass(frozen=True, eq=False)
class Comparison:
    """Everything that the tables, plots and the sentence are made from."""

    runs: tuple[Run, ...]
    steps: NDArray[np.int64]  # common to all runs
    warmup_steps: int
    statistics: tuple[Statistics, ...]  # one a run
    verdicts: tuple[Verdict, ...]  # one a pair, those with the first run in front
    warnings: tuple[str, ...]

    @property
    def has_nonfinite(self) -> bool:
        """A training or evaluation loss is NaN or Inf, in the common steps or beyond them."""
        return any(run.has_nonfinite for run in self.runs)

    def against_first(self) -> tuple[Verdict, ...]:
        """The verdicts of the other runs against the first."""
        return self.verdicts[: len(self.runs) - 1]

    def twins(self, index: int) -> list[int]:
        """The runs whose losses equal those of one run, itself among them."""
        pairs = combinations(range(len(self.runs)), 2)
        twins = {index}
        for pair, verdict in zip(pairs, self.verdicts, strict=True):
            if index in pair and verdict.first_difference is None:
                twins.update(pair)
        return sorted(twins)

    def sentence(self) -> str:
        """What the comparison found: each run against the first, in loss and in memory."""
        first = self.statistics[0]
        clauses = [] if len(self.runs) > 1 else [self._alone()]
        for verdict, other in zip(self.against_first(), self.statistics[1:], strict=True):
            clause = str(verdict)
            if verdict.first_difference is not None:
                clause += f" ({_mean_loss_change(first, other)})"
            clauses.append(clause + _memory_change(first, other, brief=bool(clauses)))
        if self.has_nonfinite:
            whose = ", ".join(f"`{run.label}`" for run in self.runs if run.has_nonfinite)
            clauses.append(f"not every loss is finite ({whose})")
        return "; ".join(clauses) + "."

    def _alone(self) -> str:
        """What there is to say of one run."""
        (run,), (statistics,) = self.runs, self.statistics
        sizes = statistics.bytes_per_parameter
        memory = f" and keeps {sizes['total']:.1f} bytes a parameter" if sizes else ""
        return (
            f"`{run.label}` has a loss of {statistics.final_loss:.4g}"
            f" after {len(self.steps)} steps{memory}"
        )


def build(runs: tuple[Run, ...]) -> Comparison:
    """Join the runs by step and compute what there is to say."""
    steps = _common_steps(runs)
    warmup_steps = max(
        (run.summary.settings.warmup_steps for run in runs if run.summary),
        default=DEFAULT_WARMUP_STEPS,
    )
    return Comparison(
        runs=runs,
        steps=steps,
        warmup_steps=warmup_steps,
        statistics=tuple(_statistics(run, steps, warmup_steps) for run in runs),
        verdicts=tuple(judge(first, second) for first, second in combinations(runs, 2)),
        warnings=caveats(runs, steps),
    )


def _common_steps(runs: Sequence[Run]) -> NDArray[np.int64]:
    steps: NDArray[np.int64] = functools.reduce(np.intersect1d, [run.history.steps for run in runs])
    if not len(steps):
        given = " ".join(str(run.path) for run in runs)
        each = ", ".join(
            f"{run.label} {run.history.steps[0]} to {run.history.steps[-1]}" for run in runs
        )
        raise UsageError("RUN", given, f"have no step in common ({each}); name runs that overlap")
    return steps


def _statistics(run: Run, steps: NDArray[np.int64], warmup_steps: int) -> Statistics:
    history = run.history
    loss = history.loss_at(steps)
    timed = history.rows_at(steps[steps >= warmup_steps])
    with np.errstate(invalid="ignore", over="ignore"):
        mean_loss, loss_std = float(loss.mean()), float(loss.std())
    return Statistics(
        final_loss=float(loss[-1]),
        mean_loss=mean_loss,
        loss_std=loss_std,
        eval_loss=run.evaluation.loss if run.evaluation else None,
        eval_step=run.evaluation.step if run.evaluation else None,
        step_s_median=_median(history.step_s, timed),
        optimizer_s_median=_median(history.optimizer_s, timed),
        bytes_per_parameter=run.memory.bytes_per_parameter() if run.memory else None,
    )


def _median(column: NDArray[np.float64] | None, rows: NDArray[np.int64]) -> float | None:
    return None if column is None or not len(rows) else float(np.median(column[rows]))


def _mean_loss_change(first: Statistics, other: Statistics) -> str:
    change = other.mean_loss - first.mean_loss
    if not np.isfinite(change):
        return f"mean loss {other.mean_loss:.4g} against {first.mean_loss:.4g}"
    if change == 0:
        return "the same mean loss"
    return f"mean loss {abs(change):.2g} {'higher' if change > 0 else 'lower'}"


def _memory_change(first: Statistics, other: Statistics, *, brief: bool) -> str:
    before, after = (
        (statistics.bytes_per_parameter or {}).get("total") for statistics in (first, other)
    )
    if not before or not after:
        return ""
    if f"{before:.1f}" == f"{after:.1f}":
        return f" and keeps as many bytes a parameter, {after:.1f}"
    percent = 100 * (after / before - 1)
    change = f"({abs(percent):.1f} % {'more' if percent > 0 else 'less'})"
    instead = "" if brief else f"instead of {before:.1f} "
    return f" and keeps {after:.1f} {instead}bytes a parameter {change}"

"""What a loss curve comes to in a few numbers, and what sets a preset apart from FP32 masters."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from halfword.train.config import PRESETS

Losses = NDArray[np.float64]  # (steps,)
Result = dict[str, Any]  # of one run, as study.py keeps it

BASELINE = "fp32-master"
FINAL_STEPS = 100
STEPS_PER_POINT = 10
MEASURES = {
    "final_loss": f"last {FINAL_STEPS} steps",
    "mean_loss": "mean loss",
    "eval_loss": "evaluation loss",
}
# How far the mean and the final loss may be from FP32 masters', averaged over seeds, in percent of
# theirs. Presets that are not here are reported, whatever they give.
BARS_PERCENT = {"exact-bf16": 0.3, "lean": 0.3, "leanest": 0.5}
WITHIN_SEED_SPREAD = {"exact-bf16", "lean"}
EQUAL = "exact"  # to the baseline, bit for bit
# How far what fine-tuning gains may be from what it gains with FP32 masters, in percent of that.
TUNING_BAR_PERCENT = 10.0
FOLLOW_IN_TUNING = ("exact", "exact-bf16", "lean")


class Spread(NamedTuple):
    """Several values in two numbers."""

    mean: float
    deviation: float | None  # of a sample; one value has none


class Verdict(NamedTuple):
    """A bar, and whether it is kept."""

    text: str
    kept: bool


@dataclass(frozen=True)
class Pairing:
    """The runs of a preset, each with the baseline's that differs from it in nothing else."""

    preset: str
    runs: tuple[Result, ...]
    baselines: tuple[Result, ...]

    def changes(self, measure: str) -> list[float]:
        """Return run minus baseline, for each run."""
        pairs = zip(self.runs, self.baselines, strict=True)
        return [float(run[measure]) - float(base[measure]) for run, base in pairs]

    def change(self, measure: str) -> Spread:
        """Return run minus baseline, over the runs."""
        return spread(self.changes(measure))

    def baseline(self, measure: str) -> Spread:
        """Return the baseline itself."""
        return spread([float(base[measure]) for base in self.baselines])

    def change_percent(self, measure: str) -> float:
        """Return the mean of run minus baseline, in percent of the baseline's mean."""
        return 100 * self.change(measure).mean / self.baseline(measure).mean

    def gain(self) -> float:
        """Return how far fine-tuning brought the evaluation loss down."""
        return float(np.mean([_gain(run) for run in self.runs]))

    def gain_percent(self) -> float:
        """Return the gain in percent of the baseline's."""
        return 100 * self.gain() / float(np.mean([_gain(base) for base in self.baselines]))

    def worst_rise(self) -> float:
        """Return the largest rise of the loss in any run."""
        return float(np.max([float(run["largest_rise"]) for run in self.runs]))  # a NaN counts

    def stalled(self) -> float | None:
        """Return the share of updates that were rounded away, where all runs recorded it."""
        shares = [run["stalled"] for run in self.runs]
        return None if None in shares else float(np.mean(shares))

    @property
    def equal(self) -> bool:
        """Every loss, weight and master weight has the baseline's bits."""
        pairs = zip(self.runs, self.baselines, strict=True)
        return all(run["digests"] == base["digests"] for run, base in pairs)


def figures(losses: Losses, warmup_steps: int) -> dict[str, float]:
    """Put a curve in a few numbers.

    A spike is told from the noise between batches by means of ten steps: `largest_rise` is how far
    they ever are above the lowest one before, from the end of the warm-up on.
    """
    points = np.array([loss for _, loss in thinned(losses[warmup_steps:])])
    return {
        "final_loss": float(losses[-FINAL_STEPS:].mean()),
        "mean_loss": float(losses.mean()),
        "largest_rise": float(np.max(points - np.minimum.accumulate(points), initial=0.0)),
    }


def thinned(losses: Losses) -> list[tuple[int, float]]:
    """Return means of ten steps, each with the number of steps done after it.

    >>> thinned(np.arange(12.0))
    [(10, 4.5), (12, 10.5)]
    """
    ends = range(STEPS_PER_POINT, len(losses) + STEPS_PER_POINT, STEPS_PER_POINT)
    parts = [losses[end - STEPS_PER_POINT : end] for end in ends]
    return [
        (min(end, len(losses)), float(part.mean())) for end, part in zip(ends, parts, strict=True)
    ]


def spread(values: Sequence[float]) -> Spread:
    """Return mean and standard deviation.

    >>> spread([1.0, 2.0, 3.0]), spread([1.0])
    (Spread(mean=2.0, deviation=1.0), Spread(mean=1.0, deviation=None))
    """
    deviation = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return Spread(float(np.mean(values)), deviation)


def grouped(results: Iterable[Result], key: str) -> dict[str, list[Result]]:
    """Part results by one word of their arms, the largest group first, then by number."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(result["arm"][key], []).append(result)
    return dict(sorted(groups.items(), key=lambda group: (-len(group[1]), float(group[0]))))


def pairings(results: Sequence[Result]) -> list[Pairing]:
    """Pair each preset's runs with the baseline's, the baseline's with themselves.

    Runs whose baseline is not there are left out.
    """
    bases = {_but_precision(run): run for run in results if run["arm"]["precision"] == BASELINE}
    found = []
    for preset in PRESETS:
        runs = [run for run in results if run["arm"]["precision"] == preset]
        runs = [run for run in runs if _but_precision(run) in bases]
        if runs:
            baselines = tuple(bases[_but_precision(run)] for run in runs)
            found.append(Pairing(preset, tuple(runs), baselines))
    return found


def verdicts(results: Sequence[Result]) -> list[Verdict]:
    """Hold the runs of one setting, over all seeds, against the bars."""
    found = []
    for pairing in pairings(results):
        if pairing.preset == EQUAL:
            found.append(_is_equal(pairing))
        if pairing.preset in BARS_PERCENT and len(pairing.runs) > 1:  # one seed is not an average
            for measure in ("mean_loss", "final_loss"):
                found += _held_to_bars(pairing, measure)
    return found


def tuning_verdicts(results: Sequence[Result]) -> list[Verdict]:
    """Hold the runs of one learning rate against the bars of fine-tuning."""
    found = []
    for pairing in pairings(results):
        if pairing.preset == EQUAL:
            found.append(_is_equal(pairing))
        if pairing.preset in FOLLOW_IN_TUNING:
            percent = pairing.gain_percent()
            text = f"{pairing.preset}: {percent:.1f} % of the gain (bar {TUNING_BAR_PERCENT:g} %)"
            found.append(Verdict(text, abs(percent - 100) <= TUNING_BAR_PERCENT))
    return found


def _is_equal(pairing: Pairing) -> Verdict:
    text = f"{pairing.preset}: equal to {BASELINE}, bit for bit, in all {len(pairing.runs)} runs"
    return Verdict(text, pairing.equal)


def _gain(run: Result) -> float:
    return float(run["start"]["eval_loss"]) - float(run["eval_loss"])


def _held_to_bars(pairing: Pairing, measure: str) -> list[Verdict]:
    preset, bar = pairing.preset, BARS_PERCENT[pairing.preset]
    percent, change = pairing.change_percent(measure), pairing.change(measure).mean
    text = f"{preset}: {MEASURES[measure]} {percent:+.3f} % (bar {bar} %)"
    found = [Verdict(text, abs(percent) <= bar)]  # NaN keeps no bar
    seeds = pairing.baseline(measure).deviation
    if preset in WITHIN_SEED_SPREAD and seeds is not None:
        text = f"{preset}: {MEASURES[measure]} {change:+.4f} (seed spread {seeds:.4f})"
        found.append(Verdict(text, abs(change) <= seeds))
    return found


def _but_precision(run: Result) -> tuple[tuple[str, str], ...]:
    return tuple((key, word) for key, word in run["arm"].items() if key != "precision")

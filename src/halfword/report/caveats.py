"""What a reader must know before believing a comparison, one line each."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halfword.report.facts import differing_facts, short
from halfword.report.runs import Run

# Differences here are the subject of a comparison or cannot change its numbers; `device` and
# `threads` are compared as the run found them, not as it was asked.
UNREMARKABLE_SETTINGS = {
    "precision", "master_weights", "moments",
    "run", "config", "resume", "overwrite", "loss_log_file", "log_interval", "log_to",
    "eval_steps", "save_steps", "keep_checkpoints", "warmup_steps", "device", "threads",
}  # fmt: skip


def caveats(runs: Sequence[Run], common: NDArray[np.int64]) -> tuple[str, ...]:
    """Non-finite losses first, then unfinished runs, then what else differs between the runs."""
    found = [line for run in runs for line in _nonfinite(run)]
    found += [line for run in runs for line in _unfinished(run)]
    if any(len(run.history.steps) > len(common) for run in runs):
        found.append(_different_steps(runs, common))
    found += _different_evaluations(runs)
    for name, values in differing_facts(runs).items():
        if name not in UNREMARKABLE_SETTINGS:
            found.append(_different_fact(name, values))
    return tuple(found)


def _nonfinite(run: Run) -> list[str]:
    history = run.history
    found = []
    steps = history.nonfinite_loss_steps()
    if len(steps):
        first = history.loss_at(steps[:1])[0]
        of = f"{len(steps)} of {len(history.steps)} steps"
        found.append(f"`{run.label}`: loss is {first} at step {steps[0]}, not finite at {of}")
    if history.nonfinite is not None:
        flagged = np.setdiff1d(history.steps[history.nonfinite != 0], steps)
        if len(flagged):
            of = f"{len(flagged)} of {len(history.steps)} steps"
            found.append(
                f"`{run.label}`: gradients not finite at step {flagged[0]}, in all at {of}"
            )
    if run.nonfinite_evaluations:
        first_evaluation = run.nonfinite_evaluations[0]
        found.append(
            f"`{run.label}`: evaluation loss is {first_evaluation.loss}"
            f" at step {first_evaluation.step}"
        )
    return found


def _unfinished(run: Run) -> list[str]:
    last = run.history.steps[-1]
    found = []
    if run.status == "interrupted":
        found.append(f"`{run.label}`: interrupted, last step {last}")
    if run.status == "unfinished":
        found.append(
            f"`{run.label}`: has no summary.json (still running, or killed);"
            f" compared by its metrics alone, last step {last}"
        )
    if run.history.torn:
        found.append(f"`{run.label}`: its last line has no end and is left out")
    return found


def _different_steps(runs: Sequence[Run], common: NDArray[np.int64]) -> str:
    each = ", ".join(
        f"`{run.label}` {len(steps)} ({steps[0]} to {steps[-1]})"
        for run in runs
        for steps in [run.history.steps]
    )
    over = f"compared over the {len(common)} common to all ({common[0]} to {common[-1]})"
    return f"the runs have different steps, {each}; {over}"


def _different_evaluations(runs: Sequence[Run]) -> list[str]:
    evaluated = {run.label: run.evaluation.step for run in runs if run.evaluation}
    if len(set(evaluated.values())) < 2:
        return []
    each = ", ".join(f"`{label}` {step}" for label, step in evaluated.items())
    return [f"evaluation losses are from different steps: {each}"]


def _different_fact(name: str, values: dict[str, Any]) -> str:
    each = ", ".join(f"`{label}` {short(value)}" for label, value in values.items())
    return f"{name} differs: {each}"

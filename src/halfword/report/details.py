"""The tables that only the page has: the spread of step times, and how the runs were made."""

import numpy as np

from halfword.report.charts import step_ms
from halfword.report.comparison import Comparison
from halfword.report.facts import differing_facts, facts_by_run, short
from halfword.report.tables import NOT_RECORDED, Table, number

# Where a run was, and how it came there: never the same in two runs, and of no effect.
PLACES = {"run", "config", "resume", "overwrite", "loss_log_file", "log_to"}


def step_times(comparison: Comparison) -> Table:
    """The spread of step times after warm-up."""
    rows = []
    for run in comparison.runs:
        times = step_ms(run, comparison.warmup_steps)
        shown = np.percentile(times, (0, 50, 95, 100)).tolist() if len(times) else [None] * 4
        rows.append((run.label, *(number(value, 1) for value in shown)))
    return Table(
        title="Step time",
        note=f"Milliseconds, without the first {comparison.warmup_steps} steps.",
        header=("run", "fastest", "median", "95 % within", "slowest"),
        rows=tuple(rows),
    )


def configuration(comparison: Comparison) -> Table:
    """What differs in text, settings, software and hardware; of one run, all it recorded."""
    runs = comparison.runs
    alone = len(runs) == 1
    values = facts_by_run(runs) if alone else differing_facts(runs)
    return Table(
        title="Configuration",
        note="As the run recorded it." if alone else "What is the same in all runs is left out.",
        header=("", *(run.label for run in runs)),
        rows=tuple(
            (name, *(short(of_runs.get(run.label, NOT_RECORDED)) for run in runs))
            for name, of_runs in values.items()
            if name not in PLACES
        ),
    )

"""What runs recorded of their text, settings, software and hardware, by name."""

from collections.abc import Sequence
from typing import Any

from halfword.report.runs import Run, Summary


def facts_by_run(runs: Sequence[Run]) -> dict[str, dict[str, Any]]:
    """All facts: name, then the run's label, then its value; a run that lacks one is left out."""
    known = {run.label: _facts(run.summary) for run in runs if run.summary}
    names = dict.fromkeys(name for of_run in known.values() for name in of_run)
    return {
        name: {label: of_run[name] for label, of_run in known.items() if name in of_run}
        for name in names
    }


def differing_facts(runs: Sequence[Run]) -> dict[str, dict[str, Any]]:
    """Those facts that are not the same in all runs that recorded them."""
    return {name: values for name, values in facts_by_run(runs).items() if not _all_equal(values)}


def short(value: Any) -> str:
    """A value as text that fits a line."""
    text = str(value)
    return text if len(text) <= 40 else text[:24] + "..."


def _facts(summary: Summary) -> dict[str, Any]:
    known = {f"corpus {name}": value for name, value in summary.corpus.items()}
    known |= summary.settings.model_dump()
    known |= {f"{name} version": version for name, version in summary.versions.items()}
    return known | {f"device {name}": value for name, value in summary.device.items()}


def _all_equal(values: dict[str, Any]) -> bool:
    first, *others = values.values()
    return all(other == first for other in others)

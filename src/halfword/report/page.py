"""The comparison as files: a Markdown page, JSON with all that it was computed from, and plots."""

import json
import math
import os
import tempfile
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from halfword.errors import UsageError
from halfword.report.comparison import Comparison
from halfword.report.history import spans
from halfword.report.runs import Run
from halfword.report.tables import tables

PLOT_KINDS = (".png", ".svg", ".pdf")


def write(comparison: Comparison, output: Path) -> list[Path]:
    """Write `comparison.md`, `comparison.json`, `loss.png` and `memory.png`: all, or none."""
    # matplotlib takes half a second to import: not before there is something to draw.
    from halfword.report.plots import draw_loss, draw_memory

    figures = {"loss.png": draw_loss(comparison), "memory.png": draw_memory(comparison)}
    texts = {"comparison.md": to_markdown(comparison), "comparison.json": to_json(comparison)}
    try:
        output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=output, prefix=".comparison-") as scratch:
            for name, text in texts.items():
                Path(scratch, name).write_text(text, encoding="utf-8")
            for name, figure in figures.items():
                figure.savefig(Path(scratch, name))
            for name in (*texts, *figures):
                os.replace(Path(scratch, name), output / name)
    except OSError as error:
        fix = f"cannot be written ({error.strerror}); name a folder that can"
        raise UsageError("--output", output, fix) from None
    return [output / name for name in (*texts, *figures)]


def write_plot(comparison: Comparison, output: Path) -> Path:
    """Write the plot of losses alone, aside first: readers see all of it or none."""
    from halfword.report.plots import draw_loss

    kind = output.suffix.lower().removeprefix(".")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=output.parent, prefix=".plot-") as scratch:
            aside = Path(scratch, output.name)
            draw_loss(comparison).savefig(aside, format=kind)
            os.replace(aside, output)
    except OSError as error:
        fix = f"cannot be written ({error.strerror}); name a file that can"
        raise UsageError("--output", output, fix) from None
    return output


def to_markdown(comparison: Comparison) -> str:
    """The sentence, the tables, equality, warnings and plots on one page."""
    names = ", ".join(f"`{run.label}`" for run in comparison.runs)
    parts = [f"# Comparison of {names}", comparison.sentence()]
    parts += [table.to_markdown() for table in tables(comparison)]
    parts += ["## Equality", _bullets(remarks_on_equality(comparison))]
    if comparison.warnings:
        parts += ["## Warnings", _bullets(comparison.warnings)]
    parts += ["## Plots", "![Loss by step](loss.png)", "![Bytes a parameter](memory.png)"]
    return "\n\n".join(parts) + "\n"


def to_json(comparison: Comparison) -> str:
    """Strict JSON; numbers that are not finite are the strings "nan", "inf" and "-inf"."""
    steps = comparison.steps
    record = {
        "format": 1,
        "sentence": comparison.sentence(),
        "has_nonfinite": comparison.has_nonfinite,
        "steps": {"count": len(steps), "first": int(steps[0]), "last": int(steps[-1])},
        "warmup_steps": comparison.warmup_steps,
        "runs": [
            _run_record(run) | asdict(statistics)
            for run, statistics in zip(comparison.runs, comparison.statistics, strict=True)
        ],
        "pairs": [asdict(verdict) | {"equal": verdict.equal} for verdict in comparison.verdicts],
        "warnings": comparison.warnings,
    }
    return json.dumps(_strict(record), indent=2, allow_nan=False) + "\n"


def remarks_on_equality(comparison: Comparison) -> list[str]:
    """Each run against the first, then those other pairs that have the same losses."""
    against_first = comparison.against_first()
    others = comparison.verdicts[len(against_first) :]
    same = [verdict for verdict in others if verdict.first_difference is None]
    return [f"{verdict}." for verdict in (*against_first, *same)]


def _run_record(run: Run) -> dict[str, Any]:
    history, summary = run.history, run.summary
    record: dict[str, Any] = {
        "label": run.label,
        "path": str(run.path),
        "status": run.status,
        "steps": {
            "count": len(history.steps),
            "first": int(history.steps[0]),
            "last": int(history.steps[-1]),
        },
        "nonfinite_losses": spans(history.nonfinite_loss_steps(), among=history.steps),
        "num_parameters": run.memory.num_parameters if run.memory else None,
        "memory_bytes": run.memory.moments() if run.memory else None,
    }
    if summary is not None:
        record |= summary.model_dump(exclude={"format", "status"})
    return record


def _strict(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _strict(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)

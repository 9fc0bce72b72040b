"""The answer as tables for a terminal."""

from collections.abc import Iterable

from halfword.planning.answer import BASELINE, BETWEEN, ENTRY, PEAK, Row
from halfword.planning.request import Request
from halfword.report.tables import Table

HELD = ("weights", "master", "gradients", "exp_avg", "exp_avg_sq", "momentum_buffer", "scales")
AT_PEAK = {
    "weights, states": (
        *("weights", "master", "exp_avg", "exp_avg_sq", "momentum_buffer", "scales"),
        "step_counters",
    ),
    "gradients": ("gradients",),
    "gathered": ("gathered_weights", "gathered_gradients"),
    "communication": ("communication",),
    "activations": ("activations", "inputs", "buffers"),
    "temporaries": ("temporaries",),
}
"""Columns of the peak's table, and the components in each."""
UNITS = (("GiB", 30), ("MiB", 20), ("KiB", 10))


def tables(request: Request, rows: list[Row], own: Row) -> list[Table]:
    """Return what is held at the entry of a step and between steps, and what at the peak."""
    found = [_held(request, rows, own)]
    if all(PEAK in row.moments for row in rows):
        found.append(_peak(rows, own))
    return found


def size(num_bytes: int) -> str:
    """Return a size with its unit.

    >>> size(3 << 29)
    '1.50 GiB'
    """
    unit, power = _unit(num_bytes)
    return f"{num_bytes / (1 << power):.2f} {unit}"


def _held(request: Request, rows: list[Row], own: Row) -> Table:
    unit, power = _unit(max(row.largest_bytes for row in rows))
    columns = [name for name in HELD if any(row.moments[ENTRY].get(name) for row in rows)]
    before = next(row for row in rows if row.name == BASELINE).moments[ENTRY]["total"]
    body = []
    for row in rows:
        entry = row.moments[ENTRY]
        cells = [entry.get(name, 0) for name in columns]
        cells += [entry["total"], row.moments[BETWEEN]["total"]]
        more = [f"{entry['total'] / before - 1:+.0%}"]
        if request.device_memory is not None:
            more.append("yes" if row.fits(request.device_memory) else "no")
        body.append((_name(row, own), *_numbers(cells, power), *more))
    fits = ("fits",) if request.device_memory is not None else ()
    names = [name.replace("_", " ") if name == "momentum_buffer" else name for name in columns]
    return Table(
        title=f"Held by a rank, {unit}",
        note="At the entry of step(), but for the column between steps; * is what the options say.",
        header=("precision", *names, "at entry", "between", f"to {BASELINE}", *fits),
        rows=tuple(body),
    )


def _peak(rows: list[Row], own: Row) -> Table:
    unit, power = _unit(max(row.largest_bytes for row in rows))
    columns = {
        title: names
        for title, names in AT_PEAK.items()
        if any(row.moments[PEAK].get(name) for row in rows for name in names)
    }
    body = []
    for row in rows:
        peak = row.moments[PEAK]
        cells = [sum(peak.get(name, 0) for name in names) for names in columns.values()]
        body.append((_name(row, own), *_numbers([*cells, peak["total"]], power)))
    return Table(
        title=f"At the peak, {unit}",
        note="Traced: the training step itself, on tensors without memory.",
        header=("precision", *columns, "peak"),
        rows=tuple(body),
    )


def _name(row: Row, own: Row) -> str:
    return row.name + " *" * (row is own)


def _numbers(sizes: Iterable[int], power: int) -> list[str]:
    return [f"{number / (1 << power):.2f}" for number in sizes]


def _unit(largest: int) -> tuple[str, int]:
    return next((unit for unit in UNITS if largest >= 1 << unit[1]), UNITS[-1])

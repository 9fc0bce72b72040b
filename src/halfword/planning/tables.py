"""The answer as a table for a terminal: presets side by side, components below each other."""

from halfword.planning.answer import BASELINE, BETWEEN, ENTRY, PEAK, Row
from halfword.planning.request import Request
from halfword.report.tables import Table

HELD = ("weights", "master", "exp_avg", "exp_avg_sq", "momentum_buffer", "scales")
AT_PEAK = {
    "gradients then": ("gradients",),
    "gathered": ("gathered_weights", "gathered_gradients"),
    "communication": ("communication",),
    "activations": ("activations", "inputs", "buffers"),
    "temporaries": ("temporaries",),
}
"""What is held only for a while, and the components of each row."""
UNITS = (("GiB", 30), ("MiB", 20), ("KiB", 10))


def table(request: Request, rows: list[Row], own: Row) -> Table:
    """Return what is held at the entry of a step, between steps, and at the peak.

    Args:
        request: the question.
        rows: the answer.
        own: the row that the settings mean.
    """
    unit, power = _unit(max(row.largest_bytes for row in rows))
    body: list[tuple[str, ...]] = []

    def add(title: str, moment: str, *names: str) -> None:
        sizes = [sum(row.moments[moment].get(name, 0) for name in names) for row in rows]
        if any(sizes):
            body.append((title, *(f"{number / (1 << power):.2f}" for number in sizes)))

    for name in HELD:
        add(name.replace("_buffer", " buffer"), ENTRY, name)
    add("gradients", ENTRY, "gradients")
    add("buckets", ENTRY, "communication")
    add("= at entry", ENTRY, "total")
    add("= between", BETWEEN, "total")
    if all(PEAK in row.moments for row in rows):
        for title, names in AT_PEAK.items():
            add(title, PEAK, *names)
        add("= at the peak", PEAK, "total")
    body.append(("change", *_changes(rows)))
    if request.device_memory is not None:
        fits = ["yes" if row.fits(request.device_memory) else "no" for row in rows]
        body.append(("fits", *fits))
    return Table(
        title=f"Memory of a rank, {unit}",
        note=f"At entry: of step(). Change: of {_largest(rows)}, against {BASELINE}.\n"
        f"The options say {own.name}.",
        header=("", *(row.name.replace("-", "- ").replace("+", "+ ") for row in rows)),
        rows=tuple(body),
    )


def size(num_bytes: int) -> str:
    """Return a size with its unit.

    >>> size(3 << 29)
    '1.50 GiB'
    """
    unit, power = _unit(num_bytes)
    return f"{num_bytes / (1 << power):.2f} {unit}"


def _largest(rows: list[Row]) -> str:
    return "the peak" if PEAK in rows[0].moments else "what is held at step entry"


def _changes(rows: list[Row]) -> list[str]:
    moment = PEAK if PEAK in rows[0].moments else ENTRY
    totals = {row.name: row.moments[moment]["total"] for row in rows}
    return [f"{total / totals[BASELINE] - 1:+.0%}" for total in totals.values()]


def _unit(largest: int) -> tuple[str, int]:
    return next((unit for unit in UNITS if largest >= 1 << unit[1]), UNITS[-1])

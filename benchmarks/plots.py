"""Draw what memory buys: each preset's evaluation loss over its bytes a parameter.

    python benchmarks/plots.py [FOLDER OF RESULTS]

Writes FOLDER/precision.png, by default into benchmarks/results/convergence/.
"""

import argparse
import sys
from itertools import cycle
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

import tables
from differences import BASELINE, Pairing, grouped, pairings
from halfword.report.plots import (
    DOTS_PER_INCH,
    GRID,
    INK,
    QUIET_INK,
    RUN_COLOURS,
    WIDTH_INCHES,
    dress,
)
from results import RESULTS

MEASURE = "eval_loss"
APART_BYTES = 0.25  # points of presets that keep nearly the same are drawn side by side


def main() -> int:
    """Draw the plot, if there are results, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=RESULTS / "convergence")
    folder = parser.parse_args().folder
    if not folder.is_dir():
        print(f"nothing is drawn, for there is no {folder}")
        return 0
    beta2, runs = next(iter(grouped(tables.read(folder), "beta2").items()))
    draw(pairings(runs), f"AdamW, beta2 {beta2}").savefig(folder / "precision.png")
    return 0


def draw(found: list[Pairing], about: str) -> Figure:
    """Draw evaluation losses minus that of FP32 masters over bytes a parameter."""
    figure = Figure((WIDTH_INCHES, 4.5), DOTS_PER_INCH, layout="constrained")
    axes = figure.subplots()
    seeds = found[0].baseline(MEASURE).deviation
    if seeds is not None and seeds > 0:
        label = f"spread of {BASELINE}\nbetween seeds"
        axes.axhspan(-seeds, seeds, color=GRID, zorder=0, label=label)
        axes.set_yscale("symlog", linthresh=seeds)
        axes.yaxis.set_major_formatter("{x:g}")
    axes.axhline(0, color=QUIET_INK, linewidth=0.8)
    position = 0.0
    coloured = zip(found, cycle(RUN_COLOURS), strict=False)
    for pairing, colour in sorted(coloured, key=lambda pair: _size(pair[0])):
        position = max(_size(pairing), position + APART_BYTES)
        _draw_point(axes, position, pairing, colour)
    dress(axes, f"evaluation loss minus that of\n{BASELINE} with the same seed")
    axes.set_xlabel("bytes per parameter at the entry of step(), gradients included", color=INK)
    axes.legend(
        loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, reverse=True, fontsize=9
    )
    figure.supxlabel(
        f"{about}. Strong: mean over seeds and standard deviation; faint: each seed.\n"
        "The scale is linear inside the grey band and logarithmic beyond it.",
        fontsize=8,
        color=QUIET_INK,
    )
    return figure


def _draw_point(axes: Axes, position: float, pairing: Pairing, colour: str) -> None:
    change = pairing.change(MEASURE)
    label = f"{pairing.preset} ({_size(pairing):.1f})"
    axes.errorbar(
        position, change.mean, change.deviation,
        fmt="o", markersize=4, color=colour, capsize=4, label=label,
    )  # fmt: skip
    each = pairing.changes(MEASURE)
    beside = [position + APART_BYTES / 2] * len(each)
    axes.plot(beside, each, "o", color=colour, alpha=0.4, markersize=3)


def _size(pairing: Pairing) -> float:
    return float(pairing.runs[0]["bytes_per_parameter"])


if __name__ == "__main__":
    sys.exit(main())

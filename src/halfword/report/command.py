"""`compare` and `report`: read runs, hold them against each other, say and write what was found."""

import os
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from halfword.errors import UsageError
from halfword.report.comparison import Comparison, build
from halfword.report.html import check_output, write_html
from halfword.report.page import PLOT_KINDS, remarks_on_equality, write, write_plot
from halfword.report.runs import load_runs
from halfword.report.tables import tables


def compare(paths: Sequence[Path], output: Path, console: Console) -> Comparison:
    """Compare two runs or more: tables on the console, a page and plots in `output`.

    Args:
        paths: run folders, or `step,loss` CSV files; the others are held against the first.
        output: a folder, made if missing, or a .png, .svg or .pdf file for the plot of losses
            alone. Nothing is written before everything was read.
        console: where the tables, warnings and the sentence go.

    Raises:
        UsageError: a path is not a run, a file in it is damaged, or the output cannot be written.
    """
    _refuse_input(output, paths)
    is_plot = output.suffix.lower() in PLOT_KINDS and not output.is_dir()
    if output.exists() and not output.is_dir() and not is_plot:
        kinds = ", ".join(PLOT_KINDS)
        raise UsageError("--output", output, f"is a file; name a folder, or a {kinds} file")
    comparison = build(load_runs(paths))
    written = [write_plot(comparison, output)] if is_plot else write(comparison, output)
    _show(comparison, written, console)
    return comparison


def report(paths: Sequence[Path], output: Path, console: Console) -> Comparison:
    """Show one run or more on a page that a browser opens without a network.

    Args:
        paths: as of `compare`; one alone is shown without a verdict.
        output: an .html file; its folder is made if missing.
        console: where the sentence goes.

    Raises:
        UsageError: a path is not a run, a file in it is damaged, or the output cannot be written.
    """
    _refuse_input(output, paths)
    check_output(output)
    comparison = build(load_runs(paths, at_least=1))
    write_html(comparison, output)
    console.print(Text(comparison.sentence(), style="bold"), soft_wrap=True)
    console.print(Text(f"Written: {output}"), soft_wrap=True)
    return comparison


def _refuse_input(output: Path, runs: Sequence[Path]) -> None:
    """Raise UsageError where the output is what would be read, or has no possible name."""
    try:
        exists = output.exists()
    except OSError as error:
        fix = f"cannot be written ({error.strerror}); name another"
        raise UsageError("--output", output, fix) from None
    if exists and any(os.path.exists(run) and output.samefile(run) for run in runs):
        raise UsageError("--output", output, "is one of the runs; name another")


def _show(comparison: Comparison, written: Sequence[Path], console: Console) -> None:
    for table in tables(comparison):
        console.print(table.to_rich())
        console.print()
    # One line each, however narrow the terminal, so that they can be searched and piped.
    for remark in remarks_on_equality(comparison):
        console.print(Text(remark), soft_wrap=True)
    for warning in comparison.warnings:
        console.print(Text(f"warning: {warning}", style="yellow"), soft_wrap=True)
    console.print()
    console.print(Text(comparison.sentence(), style="bold"), soft_wrap=True)
    console.print(Text("Written: " + " ".join(map(str, written))), soft_wrap=True)

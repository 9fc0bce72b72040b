"""The comparison as tables: made once, as text, then shown on a terminal or as Markdown."""

from collections.abc import Iterable
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.table import Table as RichTable
from rich.text import Text

from halfword.report.comparison import Comparison

# The order of the stack: what is there first comes first. Others follow as they are found.
COMPONENTS = ["weights", "master_weights", "moments", "gradients"]
BESIDE = ("communication", "buffers", "scalars")  # small, or there on several ranks only
NOT_RECORDED = "-"


@dataclass(frozen=True)
class Table:
    """Cells as text, one row a run; the first column is the run's label."""

    title: str
    note: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def to_rich(self) -> RichTable:
        """For the terminal."""
        table = RichTable(
            title=self.title,
            title_justify="left",
            caption=self.note,
            caption_justify="left",
            box=SIMPLE_HEAD,
        )
        table.add_column(self.header[0], overflow="fold")
        for name in self.header[1:]:
            # A narrow terminal may fold a run's name, never a number.
            table.add_column(name.replace(" ", "\n"), justify="right", no_wrap=True)
        for row in self.rows:
            # Text, as a run's name may look like rich's markup.
            table.add_row(*map(Text, row))
        return table

    def to_markdown(self) -> str:
        """With a heading and the note below."""
        rule = ["---"] + ["---:"] * (len(self.header) - 1)
        lines = [_markdown_row(cells) for cells in (self.header, rule, *self.rows)]
        return "\n".join([f"## {self.title}", "", *lines, "", self.note])


def tables(comparison: Comparison) -> tuple[Table, ...]:
    """Loss and time, then memory."""
    return (_loss_and_time(comparison), _memory(comparison), *_moments(comparison))


def components(comparison: Comparison) -> list[str]:
    """The components of memory worth a column: the four, and what shows in hundredths."""
    measured = [s.bytes_per_parameter for s in comparison.statistics if s.bytes_per_parameter]
    others = dict.fromkeys(
        name
        for sizes in measured
        for name, size in sizes.items()
        if name not in (*COMPONENTS, "total") and size >= 0.005
    )
    return [*COMPONENTS, *others]


def component_title(name: str) -> str:
    """`master_weights` as a reader says it."""
    return name.replace("_", " ")


def number(value: float | None, digits: int, unit: float = 1.0) -> str:
    """A cell's number in a unit, or the mark of what was not recorded."""
    return NOT_RECORDED if value is None else f"{value / unit:.{digits}f}"


def _loss_and_time(comparison: Comparison) -> Table:
    steps = comparison.steps
    return Table(
        title="Loss and time",
        note=f"Losses over the {len(steps)} steps common to all runs ({steps[0]} to {steps[-1]});"
        " evaluation loss: each run's last;"
        f" times: medians without the first {comparison.warmup_steps} steps.",
        header=("run", "final loss", "mean loss", "std", "eval loss", "step ms", "optimizer ms"),
        rows=tuple(
            (
                run.label,
                number(statistics.final_loss, 4),
                number(statistics.mean_loss, 4),
                number(statistics.loss_std, 4),
                number(statistics.eval_loss, 4),
                number(statistics.step_s_median, 1, unit=1e-3),
                number(statistics.optimizer_s_median, 1, unit=1e-3),
            )
            for run, statistics in zip(comparison.runs, comparison.statistics, strict=True)
        ),
    )


def _memory(comparison: Comparison) -> Table:
    columns = [*components(comparison), "total"]
    rows = []
    for run, statistics in zip(comparison.runs, comparison.statistics, strict=True):
        sizes = statistics.bytes_per_parameter
        cells = [number(sizes.get(name, 0.0) if sizes else None, 2) for name in columns]
        rows.append((run.label, *cells))
    return Table(
        title="Bytes a parameter",
        note="Alive at the entry of step(), which needs all of it at once.",
        header=("run", *map(component_title, columns)),
        rows=tuple(rows),
    )


def _moments(comparison: Comparison) -> list[Table]:
    """What each run held at each moment, in MiB; none where no run recorded more than one."""
    measured = {run.label: run.memory.moments() for run in comparison.runs if run.memory}
    if all(len(moments) < 2 for moments in measured.values()):
        return []
    names = {name for moments in measured.values() for sizes in moments.values() for name in sizes}
    others = sorted(names - {*COMPONENTS, *BESIDE, "transient"})
    columns = [*COMPONENTS, *(["transient"] if "transient" in names else []), "other"]
    rows = []
    for label, moments in measured.items():
        for moment, sizes in moments.items():
            beside = sum(sizes.get(name, 0) for name in (*BESIDE, *others))
            cells = [*(sizes.get(name, 0) for name in columns[:-1]), beside, sum(sizes.values())]
            shown = [number(size, 2, unit=1 << 20) for size in cells]
            rows.append((f"{label}, {moment}", *shown))
    return [
        Table(
            title="Memory of the first rank, MiB",
            note="Measured by storage, planned by arithmetic; the peak of one early step as the "
            "allocator reports it, transient: activations, temporaries, communication.",
            header=("run", *map(component_title, columns), "total"),
            rows=tuple(rows),
        )
    ]


def _markdown_row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

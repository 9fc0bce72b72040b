import io
import math

from rich.console import Console

from halfword.report.tables import Table, tables

LOSSES = [4.0, 3.0, 2.5, 2.25]


def test_a_run_is_one_row_of_each_table(write_run, compared):
    paths = [write_run("fp32-master", LOSSES, sizes=(2, 4, 8, 2)), write_run("exact", LOSSES)]
    loss, memory = tables(compared(*paths))
    assert loss.header == (
        "run", "final loss", "mean loss", "std", "eval loss", "step ms", "optimizer ms",
    )  # fmt: skip
    assert loss.rows[1] == ("exact", "2.2500", "2.9375", "0.6702", "1.7500", "500.0", "250.0")
    assert "4 steps common to all runs (0 to 3)" in loss.note
    assert "without the first 2 steps" in loss.note
    assert memory.header == (
        "run", "weights", "master weights", "moments", "gradients", "total",
    )  # fmt: skip
    assert memory.rows == (
        ("fp32-master", "2.00", "4.00", "8.00", "2.00", "16.00"),
        ("exact", "2.00", "2.00", "8.00", "2.00", "14.00"),
    )


def test_what_is_not_recorded_is_a_dash(write_run, write_csv, compared):
    loss, memory = tables(compared(write_run("exact", LOSSES), write_csv("b.csv", LOSSES)))
    assert loss.rows[1] == ("b", "2.2500", "2.9375", "0.6702", "-", "-", "-")
    assert memory.rows[1] == ("b", "-", "-", "-", "-", "-")


def test_nan_and_inf_are_shown_as_they_are(write_run, compared):
    paths = [write_run("a", LOSSES), write_run("b", [*LOSSES[:3], math.nan])]
    assert tables(compared(*paths))[0].rows[1][:4] == ("b", "nan", "nan", "nan")


def test_a_component_of_its_own_gets_a_column_when_it_shows(write_run, compared):
    path = write_run("exact", LOSSES)
    memory_file = path / "memory.json"
    memory_file.write_text(memory_file.read_text().replace('{"t": 4}', '{"t": 400}'))
    _, memory = tables(compared(path, path))
    assert memory.header[-2:] == ("scalars", "total")
    assert memory.rows[0][-2:] == ("0.40", "14.40")


def test_markdown_has_the_same_cells_and_keeps_a_bar_in_a_name(write_run, compared):
    table = Table("T", "a note", ("run", "final loss"), (("a|b", "1.0"),))
    assert table.to_markdown() == (
        "## T\n\n| run | final loss |\n| --- | ---: |\n| a\\|b | 1.0 |\n\na note"
    )


def test_a_narrow_terminal_folds_names_and_never_numbers():
    name = "a-very-long-name-[bold]-" * 8
    table = Table("T", "a note", ("run", "final loss"), ((name, "123456.7890"),))
    terminal = io.StringIO()
    Console(file=terminal, width=50).print(table.to_rich())
    shown = terminal.getvalue()
    assert "123456.7890" in shown
    assert name in "".join(line.strip().split(" ")[0] for line in shown.splitlines())

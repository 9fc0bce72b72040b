import io
import math
import subprocess
import sys

import pytest
from rich.console import Console

from halfword.errors import UsageError
from halfword.report import compare, report

LOSSES = [4.0, 3.0, 2.5, 2.25]
FILES = ["comparison.json", "comparison.md", "loss.png", "memory.png"]


@pytest.fixture
def terminal():
    return Console(file=io.StringIO(), width=100)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_comparison_is_printed_and_written(write_run, tmp_path, terminal):
    paths = [write_run("fp32-master", LOSSES, sizes=(2, 4, 8, 2)), write_run("exact", LOSSES)]
    output = tmp_path / "new" / "folder"
    comparison = compare(paths, output, terminal)
    shown = terminal.file.getvalue()
    assert comparison.sentence() in shown and "Bytes a parameter" in shown
    assert names(output) == FILES
    assert (output / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name, begins", [("a.png", b"\x89PNG"), ("new/a.PDF", b"%PDF")])
def test_an_output_that_ends_as_a_picture_is_the_loss_plot_alone(
    write_run, tmp_path, terminal, name, begins
):
    paths = [write_run("fp32-master", LOSSES), write_run("exact", LOSSES)]
    for _ in range(2):  # a plot that is there is replaced
        compare(paths, tmp_path / "out" / name, terminal)
    assert (tmp_path / "out" / name).read_bytes().startswith(begins)
    assert len(list((tmp_path / "out").rglob("*.*"))) == 1


def test_a_folder_that_is_named_as_a_picture_stays_a_folder(write_run, tmp_path, terminal):
    path, output = write_run("exact", LOSSES), tmp_path / "out.png"
    output.mkdir()
    compare([path, path], output, terminal)
    assert names(output) == FILES


def test_warnings_are_one_line_each_on_a_narrow_terminal(write_run, tmp_path):
    narrow = Console(file=io.StringIO(), width=40)
    paths = [write_run("a", LOSSES), write_run("[red]b", [*LOSSES[:3], math.inf])]
    compare(paths, tmp_path / "out", narrow)
    warning = "warning: `[red]b`: loss is inf at step 3, not finite at 1 of 4 steps"
    assert warning in narrow.file.getvalue().splitlines()


def test_an_earlier_comparison_is_replaced(write_run, tmp_path, terminal):
    path = write_run("exact", LOSSES)
    output = tmp_path / "out"
    output.mkdir()
    (output / "comparison.md").write_text("old")
    compare([path, path], output, terminal)
    assert names(output) == FILES and "old" not in (output / "comparison.md").read_text()


def test_nothing_is_written_when_a_run_is_bad(write_run, tmp_path, terminal):
    good, bad = write_run("good", LOSSES), write_run("bad", LOSSES)
    (bad / "summary.json").write_text("{")
    with pytest.raises(UsageError):
        compare([good, bad], tmp_path / "out", terminal)
    assert not (tmp_path / "out").exists() and terminal.file.getvalue() == ""


def test_an_output_that_is_a_file_is_refused(write_run, tmp_path, terminal):
    path = write_run("exact", LOSSES)
    output = tmp_path / "out"
    output.write_text("mine")
    with pytest.raises(UsageError) as error:
        compare([path, path], output, terminal)
    assert str(error.value) == (
        f"--output {output}: is a file; name a folder, or a .png, .svg, .pdf file"
    )
    assert output.read_text() == "mine"


def test_an_output_that_cannot_be_written_is_refused(write_run, tmp_path, terminal):
    path = write_run("exact", LOSSES)
    output = path / "metrics.csv" / "out"
    with pytest.raises(UsageError) as error:
        compare([path, path], output, terminal)
    fix = "cannot be written (Not a directory); name a folder that can"
    assert str(error.value) == f"--output {output}: {fix}"


@pytest.mark.parametrize(("command", "suffix"), [(compare, ".png"), (report, ".html")])
def test_an_output_that_is_an_input_is_refused(command, suffix, tmp_path, terminal):
    losses = tmp_path / f"losses{suffix}"
    losses.write_text("step,loss\n0,4.0\n1,3.0\n")
    with pytest.raises(UsageError, match="is one of the runs; name another"):
        command([losses, losses], losses, terminal)
    assert losses.read_text().startswith("step,loss")


@pytest.mark.parametrize("command", [compare, report])
def test_a_name_that_is_too_long_is_refused(command, write_run, tmp_path, terminal):
    path = write_run("exact", LOSSES)
    with pytest.raises(UsageError, match="cannot be written .File name too long.; name another"):
        command([path, path], tmp_path / f"{'n' * 300}.html", terminal)


def test_a_failed_write_leaves_the_earlier_comparison_whole(
    write_run, tmp_path, terminal, monkeypatch
):
    path = write_run("exact", LOSSES)
    output = tmp_path / "out"
    compare([path, path], output, terminal)
    before = {name: (output / name).read_bytes() for name in FILES}

    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", full)
    with pytest.raises(UsageError, match=r"cannot be written \(No space left on device\)"):
        compare([path, write_run("bf16", LOSSES)], output, terminal)
    assert {name: (output / name).read_bytes() for name in names(output)} == before


def test_importing_the_report_loads_no_matplotlib():
    program = "import sys, halfword.report; print('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr

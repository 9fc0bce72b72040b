"""Names and locks of run folders, and that nothing foreign is ever removed."""

import os
from pathlib import Path

import pytest

from halfword.errors import UsageError
from halfword.train.run_folder import claim, clear


def take(run: Path | None, default: Path = Path("unused"), *, overwrite: bool = False) -> Path:
    """Hold a run for a moment: with its files, as training leaves them."""
    with claim(run, default, overwrite=overwrite) as folder:
        clear(folder, past_step=0)
        (folder / "config.toml").write_text("a run")
    return folder


def test_a_default_name_is_numbered_when_taken(tmp_path: Path) -> None:
    default = tmp_path / "runs" / "exact"
    assert [take(None, default).name for _ in range(3)] == ["exact", "exact-2", "exact-3"]


def test_a_run_is_replaced_only_when_asked_and_other_files_stay(tmp_path: Path) -> None:
    run = take(tmp_path / "run")
    (run / "metrics.csv").write_text("old")
    (run / "summary.json").write_text("old")
    (run / "notes.md").write_text("mine")
    with pytest.raises(UsageError, match="holds a run; give --overwrite to replace it"):
        take(run)
    assert (run / "metrics.csv").read_text() == "old"
    take(run, overwrite=True)
    assert sorted(os.listdir(run)) == ["config.toml", "metrics.csv", "notes.md"]


def test_a_foreign_folder_is_refused_even_to_overwrite(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(UsageError, match="holds other files; name a new or an empty folder"):
        take(tmp_path, overwrite=True)
    assert os.listdir(tmp_path) == ["thesis.tex"]


def test_an_empty_folder_may_be_named(tmp_path: Path) -> None:
    assert take(tmp_path) == tmp_path


def test_a_run_that_is_refused_leaves_no_folder(tmp_path: Path) -> None:
    for run in (tmp_path / "a" / "b" / "run", None):
        with pytest.raises(UsageError, match="bad text"):
            with claim(run, tmp_path / "runs" / "exact", overwrite=False):
                raise UsageError("--data", "x", "bad text")
    assert os.listdir(tmp_path) == []


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    with claim(tmp_path / "run", Path("unused"), overwrite=False):
        with pytest.raises(UsageError, match="run: is in use by another halfword process$"):
            take(tmp_path / "run", overwrite=True)


@pytest.mark.parametrize("run", ["file", "file/run", "/proc/nowhere/run"])
def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path, run: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        UsageError, match="--run .*: (cannot be written: |is a file; name a folder)"
    ):
        take(tmp_path / run)
    assert os.listdir(tmp_path) == ["file"]

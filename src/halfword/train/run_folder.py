"""The folder of a run: its name, its lock, and what may be replaced in it."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from halfword.checkpoint import checkpoints
from halfword.errors import UsageError

CHECKPOINTS = "checkpoints"
TOKENIZER = "tokenizer.json"
TENSORBOARD = "tensorboard"
WANDB = "wandb"
RUN_FILES = frozenset({"config.toml", "metrics.csv", "summary.json", "memory.json"})
LOCK = ".lock"


@contextlib.contextmanager
def claim(run: Path | None, default: Path, *, overwrite: bool) -> Iterator[Path]:
    """Take a run's folder, made where missing, and hold its lock.

    A folder that is left without a file in it is removed again, so that a run that is refused
    leaves nothing. A run that is there already stays until `clear`.

    Args:
        run: the folder that was asked for; None takes `default`, or `default`-2, -3 if taken.
        default: the folder for a run without a name.
        overwrite: whether `run` may hold a run.

    Raises:
        UsageError: the folder cannot be written, is in use, or holds something.
    """
    made: list[Path] = []
    try:
        folder = _make_default(default, made) if run is None else _make(run, made)
        lock = FileLock(folder / LOCK)
        lock.acquire(blocking=False)
    except Timeout:
        raise UsageError("--run", run, "is in use by another halfword process") from None
    except OSError as error:
        _remove_empty(made)
        fix = f"cannot be written: {error.strerror}"
        raise UsageError("--run", run or default, fix) from None
    try:
        _check_contents(folder, overwrite)
        yield folder
    finally:
        (folder / LOCK).unlink(missing_ok=True)  # while held: nobody can be waiting for it
        lock.release()
        _remove_empty(made)


def clear(folder: Path, past_step: int) -> None:
    """Remove what a run left that a new one, or one resumed at `past_step`, will not have made.

    metrics.csv is the new run's already. Checkpoints past the step belong to a course that is given
    up; were they kept, the next resume would take it again.
    """
    for name in ("config.toml", "summary.json", TOKENIZER):
        (folder / name).unlink(missing_ok=True)
    for step, checkpoint in checkpoints(folder / CHECKPOINTS):
        if step > past_step:
            shutil.rmtree(checkpoint)
    if not past_step:
        (folder / "memory.json").unlink(missing_ok=True)
        for name in (TENSORBOARD, WANDB):
            shutil.rmtree(folder / name, ignore_errors=True)


def _make_default(default: Path, made: list[Path]) -> Path:
    """Make a folder that was not there: two runs at once never get the same."""
    _make(default.parent, made)
    number = 1
    while True:
        folder = default if number == 1 else default.with_name(f"{default.name}-{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
        else:
            made.append(folder)
            return folder


def _make(folder: Path, made: list[Path]) -> Path:
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        made.append(path)
    if not folder.is_dir():
        raise UsageError("--run", folder, "is a file; name a folder")
    return folder


def _check_contents(folder: Path, overwrite: bool) -> None:
    entries = set(os.listdir(folder)) - {LOCK}
    if not entries:
        return
    if not entries & RUN_FILES:
        raise UsageError("--run", folder, "holds other files; name a new or an empty folder")
    if not overwrite:
        fix = "holds a run; give --overwrite to replace it, or name another folder"
        raise UsageError("--run", folder, fix)


def _remove_empty(made: list[Path]) -> None:
    for path in reversed(made):
        try:
            path.rmdir()
        except OSError:  # not empty
            return

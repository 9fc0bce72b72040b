"""What a run wrote at every step: read from `metrics.csv` or from a plain `step,loss` file."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from halfword.errors import UsageError

RUN_HEADER = "step,loss,lr,grad_norm,tokens,step_s,optimizer_s,nonfinite,stalled".split(",")
PLAIN_HEADER = ["step", "loss"]


@dataclass(frozen=True, eq=False)
class History:
    """One row a step, steps increasing; a plain file knows only steps and losses."""

    steps: NDArray[np.int64]  # (rows,)
    loss: NDArray[np.float64]  # (rows,), NaN and Inf as they were
    step_s: NDArray[np.float64] | None
    optimizer_s: NDArray[np.float64] | None
    nonfinite: NDArray[np.float64] | None  # not 0 where loss or gradients were NaN or Inf
    torn: bool  # the last line had no end and was left out

    def rows_at(self, steps: NDArray[np.int64]) -> NDArray[np.int64]:
        """The positions of steps that are known to be there."""
        return np.searchsorted(self.steps, steps)

    def loss_at(self, steps: NDArray[np.int64]) -> NDArray[np.float64]:
        """The losses of steps that are known to be there."""
        return self.loss[self.rows_at(steps)]

    def nonfinite_loss_steps(self) -> NDArray[np.int64]:
        """The steps whose loss is NaN or Inf."""
        return self.steps[~np.isfinite(self.loss)]


def read_history(path: Path, headers: list[list[str]]) -> History:
    """Read a CSV file that has one of the given headers.

    A last line without its end is left out: its writer was stopped in the middle of a number, or
    is still writing, and `2.3` may have been going to be `2.345`.
    """
    lines, torn = _complete_lines(path)
    if not lines:
        raise UsageError("RUN", path, f"is empty; expected the header {_names(headers)}")
    header = lines[0].split(",")
    if header not in headers:
        fix = f"has the header {lines[0][:60]!r}; expected {_names(headers)}"
        raise UsageError("RUN", path, fix)
    steps: list[int] = []
    values: list[list[float]] = []
    for number, line in enumerate(lines[1:], start=2):
        if not line:
            continue
        step, row_values = _parse(line.split(","), header, path, number)
        if steps and step <= steps[-1]:
            fix = f"line {number}: step {step} follows step {steps[-1]}; steps must increase"
            raise UsageError("RUN", path, fix)
        steps.append(step)
        values.append(row_values)
    if not steps:
        raise UsageError("RUN", path, "holds no complete step yet; compare it after its first step")
    columns = dict(zip(header[1:], np.array(values, dtype=np.float64).T, strict=True))
    return History(
        steps=np.array(steps, dtype=np.int64),
        loss=columns["loss"],
        step_s=columns.get("step_s"),
        optimizer_s=columns.get("optimizer_s"),
        nonfinite=columns.get("nonfinite"),
        torn=torn,
    )


def spans(steps: NDArray[np.int64], among: NDArray[np.int64]) -> list[tuple[int, int]]:
    """First and last step of each stretch of `steps` without a break in `among`.

    >>> spans(np.array([20, 30, 60]), among=np.arange(0, 100, 10))
    [(20, 30), (60, 60)]
    """
    if not len(steps):
        return []
    positions = np.searchsorted(among, steps)
    breaks = np.flatnonzero(np.diff(positions) > 1) + 1
    return [(int(part[0]), int(part[-1])) for part in np.split(steps, breaks)]


def _complete_lines(path: Path) -> tuple[list[str], bool]:
    try:
        # Some spreadsheets begin a CSV file with a byte order mark.
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise UsageError("RUN", path, "is not text; give a run folder or a CSV file") from None
    except OSError as error:
        raise UsageError("RUN", path, f"cannot be read ({error.strerror})") from None
    *lines, rest = text.split("\n")
    return lines, bool(rest)


def _parse(row: list[str], header: list[str], path: Path, line: int) -> tuple[int, list[float]]:
    if len(row) != len(header):
        fix = f"line {line}: {len(row)} values under a header of {len(header)}; restore the file"
        raise UsageError("RUN", path, fix)
    try:
        step = int(np.int64(row[0]))  # refuses what 64 bits cannot hold
    except (ValueError, OverflowError):
        fix = f"line {line}: step {row[0]!r} is not a whole number; restore the file"
        raise UsageError("RUN", path, fix) from None
    values = []
    for name, text in zip(header[1:], row[1:], strict=True):
        try:
            values.append(float(text))
        except ValueError:
            fix = f"line {line}: {name} {text!r} is not a number; restore the file"
            raise UsageError("RUN", path, fix) from None
    return step, values


def _names(headers: list[list[str]]) -> str:
    return " or ".join(",".join(header) for header in headers)

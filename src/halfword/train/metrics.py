"""What a run writes: a row a step in metrics.csv, and JSON files that are whole or not there."""

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self, TextIO

from halfword.errors import UsageError


class Row(NamedTuple):
    """One step, under the names that metrics.csv has for its columns."""

    step: int  # from 0
    loss: float  # mean over the step's tokens, before its update
    lr: float  # that this step's update used
    grad_norm: float  # before clipping
    tokens: int  # targets of this step that count
    step_s: float  # all of the step but logging and evaluation
    optimizer_s: float  # clipping and update
    nonfinite: int  # 1 if the loss or the gradients' norm is NaN or Inf
    stalled: float  # share of weights whose FP32 value would have changed; NaN where not counted


class MetricsLog:
    """metrics.csv, and the file of --loss_log_file where one is given; each row is flushed.

    Both begin with the rows that a resumed run has already, and drop whatever came after them.
    """

    def __init__(self, folder: Path, loss_log_file: Path | None, rows: Sequence[Row] = ()) -> None:
        metrics = folder / "metrics.csv"
        header = ",".join(Row._fields)
        self._loss_log = None
        if loss_log_file:
            self._loss_log = _begin_loss_log(loss_log_file, rows)
        write_whole(metrics, "".join(f"{line}\n" for line in (header, *map(_metrics_line, rows))))
        self._metrics = metrics.open("a", encoding="utf-8")

    def write(self, row: Row) -> None:
        """Append a row; numbers have all their digits, NaN is `nan`."""
        _write_line(self._metrics, _metrics_line(row))
        if self._loss_log:
            _write_line(self._loss_log, f"{row.step},{row.loss!r}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._metrics.close()
        if self._loss_log:
            self._loss_log.close()


def write_json(file: Path, record: dict[str, Any]) -> None:
    """Write a file aside and rename it: readers see all of it or none.

    JSON has no NaN and no infinities: they become the strings "nan", "inf" and "-inf".
    """
    text = json.dumps(_without_nonfinite(record), indent=2, allow_nan=False) + "\n"
    write_whole(file, text)


def write_whole(file: Path, text: str) -> None:
    """Write a text file aside and rename it."""
    aside = file.with_name(f".{file.name}.tmp")
    aside.write_text(text, encoding="utf-8")
    os.replace(aside, file)


def _metrics_line(row: Row) -> str:
    return ",".join(map(repr, row))


def _begin_loss_log(file: Path, rows: Sequence[Row]) -> TextIO:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        opened = file.open("w", encoding="utf-8")
    except OSError as error:
        fix = f"cannot be written: {error.strerror}"
        raise UsageError("--loss_log_file", file, fix) from None
    _write_line(opened, "step,loss")
    for row in rows:
        _write_line(opened, f"{row.step},{row.loss!r}")
    return opened


def _write_line(file: TextIO, line: str) -> None:
    file.write(line + "\n")
    file.flush()


def _without_nonfinite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nonfinite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_nonfinite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return value

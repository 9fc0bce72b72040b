"""What is written is what was measured: all digits, NaN and all."""

import json
import math
from pathlib import Path

import pytest

from halfword.errors import UsageError
from halfword.train.metrics import MetricsLog, Row, write_json


def make_row(step: int, loss: float) -> Row:
    return Row(step, loss, 1 / 3, 0.1, 64, 0.5, 0.25, int(not math.isfinite(loss)), math.nan)


def test_rows_have_all_digits_and_nan_is_written_as_nan(tmp_path: Path) -> None:
    losses = [0.1 + 0.2, math.nan, math.inf]
    with MetricsLog(tmp_path, tmp_path / "loss.csv") as log:
        for step, loss in enumerate(losses):
            log.write(make_row(step, loss))
    assert (tmp_path / "metrics.csv").read_text().splitlines() == [
        "step,loss,lr,grad_norm,tokens,step_s,optimizer_s,nonfinite,stalled",
        "0,0.30000000000000004,0.3333333333333333,0.1,64,0.5,0.25,0,nan",
        "1,nan,0.3333333333333333,0.1,64,0.5,0.25,1,nan",
        "2,inf,0.3333333333333333,0.1,64,0.5,0.25,1,nan",
    ]
    assert (tmp_path / "loss.csv").read_text().splitlines() == [
        "step,loss", "0,0.30000000000000004", "1,nan", "2,inf",
    ]  # fmt: skip


def test_each_row_can_be_read_at_once(tmp_path: Path) -> None:
    with MetricsLog(tmp_path, None) as log:
        log.write(make_row(0, 1.0))
        assert (tmp_path / "metrics.csv").read_text().endswith(",0,nan\n")


def test_a_loss_log_that_cannot_be_written_is_refused_before_metrics_begin(tmp_path: Path) -> None:
    (tmp_path / "a file").touch()
    with pytest.raises(UsageError, match=r"^--loss_log_file .*: cannot be written: "):
        MetricsLog(tmp_path, tmp_path / "a file" / "loss.csv")
    assert not (tmp_path / "metrics.csv").exists()


def test_json_stays_valid_with_numbers_that_are_not_finite(tmp_path: Path) -> None:
    file = tmp_path / "summary.json"
    write_json(file, {"a": [math.nan, 1.5], "b": {"c": -math.inf, "d": None}})

    def refuse(constant: str) -> None:
        pytest.fail(f"{constant} is not JSON")

    record = json.loads(file.read_text(), parse_constant=refuse)
    assert record == {"a": ["nan", 1.5], "b": {"c": "-inf", "d": None}}
    assert list(tmp_path.iterdir()) == [file]

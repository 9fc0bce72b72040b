import math

import numpy as np
import pytest

from halfword.errors import UsageError
from halfword.report.history import PLAIN_HEADER, RUN_HEADER, read_history


def read(tmp_path, text, headers=(PLAIN_HEADER,)):
    path = tmp_path / "losses.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_history(path, list(headers))


def test_all_digits_of_a_loss_are_kept(tmp_path):
    history = read(tmp_path, "step,loss\n0,0.1\n10,0.30000000000000004\n")
    assert history.steps.tolist() == [0, 10]
    assert history.loss.tolist() == [0.1, 0.1 + 0.2]
    assert history.step_s is None and not history.torn


def test_nan_and_inf_are_read_as_they_are_and_change_no_other_row(tmp_path):
    history = read(tmp_path, "step,loss\n0,5.0\n1,4.0\n2,nan\n3,inf\n4,3.0\n")
    assert math.isnan(history.loss[2]) and math.isinf(history.loss[3])
    assert history.loss[[0, 1, 4]].tolist() == [5.0, 4.0, 3.0]
    assert history.nonfinite_loss_steps().tolist() == [2, 3]


@pytest.mark.parametrize("torn", ["2,2.3", "2", "2,", ","])
def test_a_torn_last_line_is_left_out(tmp_path, torn):
    history = read(tmp_path, "step,loss\n0,3.0\n1,2.5\n" + torn)
    assert history.steps.tolist() == [0, 1] and history.torn


def test_line_ends_of_windows_a_byte_order_mark_and_empty_lines_are_read(tmp_path):
    history = read(tmp_path, b"\xef\xbb\xbfstep,loss\r\n0,3.0\r\n1,2.5\r\n\r\n")
    assert history.loss.tolist() == [3.0, 2.5] and not history.torn


def test_the_times_of_a_run_are_read(tmp_path):
    row = "0,3.0,0.001,1.0,64,0.5,0.25,1,nan"
    history = read(tmp_path, f"{','.join(RUN_HEADER)}\n{row}\n", [RUN_HEADER])
    assert (history.step_s[0], history.optimizer_s[0], history.nonfinite[0]) == (0.5, 0.25, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty; expected the header step,loss"),
        ("loss,step\n1,0\n", "has the header 'loss,step'; expected step,loss"),
        ("step,loss\n", "holds no complete step yet; compare it after its first step"),
        ("step,loss\n0,3", "holds no complete step yet; compare it after its first step"),
        ("step,loss\n0,3.0\n1,x\n", "line 3: loss 'x' is not a number; restore the file"),
        ("step,loss\n0,3.0\n1,\n", "line 3: loss '' is not a number; restore the file"),
        ("step,loss\n0.5,3.0\n", "line 2: step '0.5' is not a whole number; restore the file"),
        ("step,loss\n9e9,3.0\n", "line 2: step '9e9' is not a whole number; restore the file"),
        (f"step,loss\n{9**40},3.0\n", f"line 2: step '{9**40}' is not a whole number; restore "),
        ("step,loss\n0\n", "line 2: 1 values under a header of 2; restore the file"),
        ("step,loss\n0,1,2\n", "line 2: 3 values under a header of 2; restore the file"),
        ("step,loss\n1,3.0\n1,2.0\n", "line 3: step 1 follows step 1; steps must increase"),
        ("step,loss\n5,3.0\n4,2.0\n", "line 3: step 4 follows step 5; steps must increase"),
        (b"\x80\x81\x82\xff\n", "is not text; give a run folder or a CSV file"),
    ],
)
def test_a_bad_file_is_told_in_one_line(tmp_path, text, message):
    with pytest.raises(UsageError) as error:
        read(tmp_path, text)
    assert str(error.value).startswith(f"RUN {tmp_path / 'losses.csv'}: {message}")
    assert "\n" not in str(error.value)


def test_a_full_header_names_both_choices(tmp_path):
    with pytest.raises(UsageError, match="expected step,loss or step,loss,lr,grad_norm,"):
        read(tmp_path, "a\n", [PLAIN_HEADER, RUN_HEADER])


def test_steps_and_losses_are_64_bits_wide(tmp_path):
    history = read(tmp_path, "step,loss\n9007199254740993,1.0\n")
    assert history.steps.dtype == np.int64 and history.steps[0] == 2**53 + 1

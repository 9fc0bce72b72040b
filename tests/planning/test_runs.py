"""The plan against real runs, as benchmarks/plan.py holds it at length."""

import pytest

from plan import TOLERANCE, compare

SETTINGS = {
    **{"hidden_dim": 64, "num_layers": 2, "seq_length": 64, "batch_size": 2, "num_steps": 6},
    **{"threads": 1, "device": "cpu", "lr_warmup_steps": 0, "stall_steps": 0},
}


@pytest.mark.parametrize(("size", "stages"), [(1, (0,)), (2, (1, 3))])
def test_a_run_holds_what_was_planned(size, stages):
    rows = compare(SETTINGS, size, stages, ("exact", "leanest"))
    assert len(rows) == 2 * len(stages)
    for row in rows:
        assert row["equal"], row
        assert abs(row["peak_error"]) <= TOLERANCE, row


def test_sums_over_micro_batches_are_planned():
    (row,) = compare(SETTINGS | {"gradient_accumulation_steps": 2}, 1, (0,), ("exact",))
    assert row["equal"] and abs(row["peak_error"]) <= TOLERANCE

"""Learning-rate schedules against their formulas."""

import math

import pytest

from halfword.train.schedule import SCHEDULES, WARMUPS, multiplier


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_warms_up_in_a_straight_line(schedule: str) -> None:
    at_step = multiplier(schedule, num_steps=100, lr_warmup_steps=4)
    assert [at_step(step) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("num_steps, warmup", [(1, 0), (1, 1), (3, 3), (7, 2), (100, 0)])
def test_every_schedule_stays_between_zero_and_one(schedule, num_steps, warmup) -> None:
    at_step = multiplier(schedule, num_steps, warmup)
    # One step past the last: LambdaLR computes it too.
    assert all(0.0 <= at_step(step) <= 1.0 for step in range(num_steps + 1))
    assert all(at_step(step) > 0.0 for step in range(num_steps))


def test_constant_stays_at_one() -> None:
    assert multiplier("constant", 10, 2)(9) == 1.0


def test_linear_reaches_zero_one_past_the_last_step() -> None:
    at_step = multiplier("linear", num_steps=12, lr_warmup_steps=2)
    assert [at_step(step) for step in (2, 7, 11, 12)] == pytest.approx([1.0, 0.5, 0.1, 0.0])


def test_cosine_is_half_way_in_the_middle() -> None:
    at_step = multiplier("cosine", num_steps=12, lr_warmup_steps=2)
    assert at_step(7) == pytest.approx(0.5)
    assert at_step(4) == pytest.approx((1 + math.cos(math.pi * 0.2)) / 2)
    assert at_step(12) == 0.0


def test_wsd_falls_over_the_last_fifth() -> None:
    at_step = multiplier("wsd", num_steps=100, lr_warmup_steps=10)
    assert {at_step(step) for step in range(10, 81)} == {1.0}
    assert [at_step(step) for step in (81, 90, 99, 100)] == [0.95, 0.5, 0.05, 0.0]


def test_a_log_warm_up_rises_as_the_logarithm_and_ends_at_the_peak() -> None:
    at_step = multiplier("constant", 10, 4, warmup_type="log")
    logs = [math.log(count) / math.log(5) for count in (2, 3, 4, 5)]
    assert [at_step(step) for step in range(5)] == pytest.approx([*logs, 1.0])
    assert multiplier("constant", 10, 1, warmup_type="log")(0) == 1.0


@pytest.mark.parametrize("warmup_type", WARMUPS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_start_and_end_are_what_a_schedule_rises_from_and_falls_to(schedule, warmup_type) -> None:
    plain = multiplier(schedule, 20, 4, warmup_type)
    at_step = multiplier(schedule, 20, 4, warmup_type, start=0.5, end=0.25)
    assert [at_step(t) for t in range(4)] == pytest.approx([0.5 + plain(t) / 2 for t in range(4)])
    rest = range(4, 21)
    assert [at_step(t) for t in rest] == pytest.approx([0.25 + 0.75 * plain(t) for t in rest])

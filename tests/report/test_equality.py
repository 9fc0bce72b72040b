import math

import pytest

LOSSES = [4.0, 3.0, 2.5, 2.25]


def verdict(comparison):
    return comparison.verdicts[0]


def test_equal_losses_and_digests_are_equal_to_the_last_bit(write_run, compared):
    found = verdict(compared(write_run("a", LOSSES), write_run("b", LOSSES)))
    assert found.equal
    assert str(found) == "`b` equals `a` to the last bit over 4 steps (losses, weights, masters)"


def test_one_bit_of_one_loss_is_a_difference(write_run, compared):
    nudged = [4.0, 3.0, math.nextafter(2.5, 3), 2.25]
    found = verdict(compared(write_run("a", LOSSES), write_run("b", nudged)))
    assert not found.equal and found.first_difference == 2
    assert str(found) == "`b` differs from `a` from step 2"


def test_minus_zero_is_not_zero(write_run, compared):
    found = verdict(compared(write_run("a", [1.0, 0.0]), write_run("b", [1.0, -0.0])))
    assert found.first_difference == 1


def test_two_nans_at_one_step_are_equal(write_run, compared):
    losses = [4.0, math.nan, math.inf, 2.25]
    assert verdict(compared(write_run("a", losses), write_run("b", losses))).equal


@pytest.mark.parametrize("other", [1.0, math.inf])
def test_a_nan_equals_nothing_else(write_run, compared, other):
    paths = [write_run("a", [4.0, math.nan]), write_run("b", [4.0, other])]
    assert verdict(compared(*paths)).first_difference == 1


@pytest.mark.parametrize(
    ("digests", "but"),
    [
        ({"weights": "w1"}, "weights"),
        ({"master_weights": "m1"}, "masters"),
        ({"weights": "w1", "master_weights": "m1"}, "weights and masters"),
        ({"weights": "w1", "master_weights": None}, "weights"),
    ],
)
def test_equal_losses_with_other_digests_are_not_equal(write_run, compared, digests, but):
    other = write_run("b", LOSSES, summary={"digests": digests})
    found = verdict(compared(write_run("a", LOSSES), other))
    assert not found.equal
    assert str(found) == f"`b` has the losses of `a` to the last bit over 4 steps, but other {but}"


def test_an_unknown_digest_is_never_taken_for_equal(write_run, compared):
    other = write_run("b", LOSSES, summary={"digests": {"master_weights": None}})
    found = verdict(compared(write_run("a", LOSSES), other))
    assert not found.equal and found.weights and found.master_weights is None
    assert str(found).endswith("over 4 steps (masters not recorded)")


def test_digests_of_runs_of_other_lengths_are_not_compared(write_run, compared):
    found = verdict(compared(write_run("a", LOSSES), write_run("b", LOSSES[:3])))
    assert not found.equal and found.weights is None
    assert str(found) == (
        "`b` has the losses of `a` to the last bit over 3 steps"
        " (weights and masters not compared, as the runs differ in length)"
    )


def test_a_pair_is_compared_over_all_its_steps_beside_a_shorter_run(write_run, compared):
    paths = [
        write_run("a", LOSSES),
        write_run("b", [*LOSSES[:3], 9.0]),
        write_run("c", LOSSES[:2]),
    ]
    comparison = compared(*paths)
    assert comparison.steps.tolist() == [0, 1]
    assert verdict(comparison).first_difference == 3


def test_every_pair_has_a_verdict(write_run, compared):
    paths = [write_run("a", LOSSES), write_run("b", [1.0] * 4), write_run("c", [1.0] * 4)]
    comparison = compared(*paths)
    pairs = [(each.first, each.second, each.equal) for each in comparison.verdicts]
    assert pairs == [("a", "b", False), ("a", "c", False), ("b", "c", True)]
    assert len(comparison.against_first()) == 2

import math

import pytest

from halfword.errors import UsageError

LOSSES = [4.0, 3.0, 2.5, 2.25, 2.0, 1.75]
OTHER_DIGESTS = {"digests": {"weights": "w1", "master_weights": "m1"}}


def test_statistics_are_of_the_common_steps(write_run, compared):
    long = write_run("long", LOSSES, step_s=[9.0, 9.0, 0.1, 0.2, 0.9, 9.0])
    short = write_run("short", LOSSES[:4])
    comparison = compared(long, short)
    assert comparison.steps.tolist() == [0, 1, 2, 3]
    statistics = comparison.statistics[0]
    mean = (4.0 + 3.0 + 2.5 + 2.25) / 4
    assert statistics.final_loss == 2.25
    assert statistics.mean_loss == mean
    squares = [(loss - mean) ** 2 for loss in LOSSES[:4]]
    assert statistics.loss_std == pytest.approx(math.sqrt(sum(squares) / 4))
    assert (statistics.eval_loss, statistics.eval_step) == (1.75, 5)


def test_times_are_medians_after_warm_up(write_run, compared):
    path = write_run("exact", LOSSES, step_s=[9.0, 9.0, 0.1, 0.2, 0.9, 0.3])
    statistics = compared(path, path).statistics[0]
    assert statistics.step_s_median == pytest.approx(0.25)
    assert statistics.optimizer_s_median == 0.25


def test_a_run_no_longer_than_its_warm_up_has_no_times(write_run, compared):
    path = write_run("exact", LOSSES[:2])
    assert compared(path, path).statistics[0].step_s_median is None


def test_all_runs_leave_out_the_longest_warm_up(write_run, compared):
    paths = [
        write_run(name, LOSSES, step_s=[9, 9, 9, 9, 1, 1], summary={"settings": settings})
        for name, settings in [("a", {"warmup_steps": 4}), ("b", {"warmup_steps": 0})]
    ]
    assert [s.step_s_median for s in compared(*paths).statistics] == [1, 1]


def test_bytes_are_by_component_and_in_total(write_run, compared):
    path = write_run("exact", LOSSES, sizes=(2, 2, 4, 2))
    sizes = compared(path, path).statistics[0].bytes_per_parameter
    assert sizes == {
        "weights": 2.0, "master_weights": 2.0, "moments": 4.0, "gradients": 2.0,
        "scalars": 0.004, "total": 10.004,
    }  # fmt: skip


def test_a_plain_csv_knows_only_losses(write_csv, write_run, compared):
    statistics = compared(write_run("exact", LOSSES), write_csv("b.csv", LOSSES)).statistics[1]
    assert statistics.mean_loss == sum(LOSSES) / 6
    unknown = (statistics.eval_loss, statistics.step_s_median, statistics.optimizer_s_median)
    assert unknown == (None, None, None) and statistics.bytes_per_parameter is None


def test_a_nan_makes_mean_and_deviation_nan_and_is_flagged(write_run, compared):
    poisoned = [4.0, 3.0, 2.5, math.nan, 2.0, 1.75]
    comparison = compared(write_run("exact", LOSSES), write_run("bf16", poisoned))
    statistics = comparison.statistics[1]
    assert math.isnan(statistics.mean_loss) and math.isnan(statistics.loss_std)
    assert statistics.final_loss == 1.75
    assert comparison.has_nonfinite
    assert comparison.warnings[0] == "`bf16`: loss is nan at step 3, not finite at 1 of 6 steps"


def test_a_nan_past_the_common_steps_is_flagged(write_run, compared):
    long = write_run("long", [*LOSSES, math.inf])
    comparison = compared(write_run("exact", LOSSES), long)
    assert comparison.has_nonfinite and not math.isinf(comparison.statistics[1].mean_loss)
    assert "`long`: loss is inf at step 6, not finite at 1 of 7 steps" in comparison.warnings


def test_a_nan_evaluation_is_flagged(write_run, compared):
    summary = {"evaluations": [{"step": 2, "loss": math.nan}, {"step": 5, "loss": 1.0}]}
    comparison = compared(write_run("a", LOSSES), write_run("b", LOSSES, summary=summary))
    assert comparison.has_nonfinite
    assert "`b`: evaluation loss is nan at step 2" in comparison.warnings


def test_finite_runs_are_not_flagged(write_run, compared):
    path = write_run("exact", LOSSES)
    comparison = compared(path, path)
    assert not comparison.has_nonfinite and comparison.warnings == ()


def test_runs_without_common_steps_are_refused(write_csv, tmp_path, compared):
    late = tmp_path / "late.csv"
    late.write_text("step,loss\n20,1.0\n")
    early = write_csv("early.csv", LOSSES)
    with pytest.raises(UsageError) as error:
        compared(early, late)
    fix = "have no step in common (early 0 to 5, late 20 to 20); name runs that overlap"
    assert str(error.value) == f"RUN {early} {late}: {fix}"


def test_the_sentence_of_two_equal_runs(write_run, compared):
    first = write_run("fp32-master", LOSSES, sizes=(2, 4, 8, 2))
    assert compared(first, write_run("exact", LOSSES)).sentence() == (
        "`exact` equals `fp32-master` to the last bit over 6 steps (losses, weights, masters)"
        " and keeps 14.0 instead of 16.0 bytes a parameter (12.5 % less)."
    )


def test_the_sentence_tells_the_others_in_brief(write_run, compared):
    higher = [*LOSSES[:2], *(loss + 0.03 for loss in LOSSES[2:])]
    paths = [
        write_run("fp32-master", LOSSES, sizes=(2, 4, 8, 2)),
        write_run("exact", LOSSES),
        write_run("bf16", higher, sizes=(2, 0, 4, 2), summary=OTHER_DIGESTS),
    ]
    assert (
        compared(*paths)
        .sentence()
        .endswith(
            "(12.5 % less); `bf16` differs from `fp32-master` from step 2 (mean loss 0.02 higher)"
            " and keeps 8.0 bytes a parameter (50.0 % less)."
        )
    )


def test_the_sentence_says_when_runs_do_not_match(write_run, compared):
    lower = [*LOSSES[:5], 1.15]
    first = write_run("fp32-master", LOSSES)
    assert compared(first, write_run("exact", lower)).sentence() == (
        "`exact` differs from `fp32-master` from step 5 (mean loss 0.1 lower)"
        " and keeps as many bytes a parameter, 14.0."
    )


def test_the_sentence_does_not_hide_a_nan(write_run, compared):
    poisoned = [*LOSSES[:5], math.nan]
    paths = [write_run("a", LOSSES), write_run("b", poisoned, sizes=(2, 4, 8, 2))]
    assert compared(*paths).sentence() == (
        "`b` differs from `a` from step 5 (mean loss nan against 2.583) and keeps 16.0 instead of"
        " 14.0 bytes a parameter (14.3 % more); not every loss is finite (`b`)."
    )


def test_the_sentence_without_memory_speaks_of_losses_alone(write_csv, compared):
    paths = [write_csv("a.csv", LOSSES), write_csv("b.csv", LOSSES)]
    assert compared(*paths).sentence() == (
        "`b` has the losses of `a` to the last bit over 6 steps (weights and masters not recorded)."
    )

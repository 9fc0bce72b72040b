import pytest

LOSSES = [4.0, 3.0, 2.5]


@pytest.mark.parametrize(
    ("change", "warning"),
    [
        ({"corpus": {"sha256": "cd" * 32}}, f"corpus sha256 differs: `a` {'ab' * 12}..., `b` cdcd"),
        ({"settings": {"seed": 1}}, "seed differs: `a` 0, `b` 1"),
        ({"settings": {"learning_rate": 0.01}}, "learning_rate differs: `a` 0.001, `b` 0.01"),
        ({"versions": {"torch": "2.14.0"}}, "torch version differs: `a` 2.13.0, `b` 2.14.0"),
        ({"device": {"threads": 4}}, "device threads differs: `a` 2, `b` 4"),
        ({"device": {"name": "B"}}, "device name differs: `a` A, `b` B"),
        ({"device": {"flags": []}}, "device flags differs: `a` ['avx2'], `b` []"),
        ({"status": "interrupted"}, "`b`: interrupted, last step 2"),
        (
            {"evaluations": [{"step": 1, "loss": 1.0}]},
            "evaluation losses are from different steps: `a` 5, `b` 1",
        ),
    ],
)
def test_a_difference_that_matters_is_one_line(write_run, compared, change, warning):
    paths = [write_run("a", LOSSES), write_run("b", LOSSES, summary=change)]
    (found,) = compared(*paths).warnings
    assert found.startswith(warning)


def test_model_shapes_are_compared_also_where_one_is_null(write_run, compared):
    a = write_run("a", LOSSES, summary={"settings": {"ffn_dim": None}})
    b = write_run("b", LOSSES, summary={"settings": {"ffn_dim": 64}})
    assert compared(a, b).warnings == ("ffn_dim differs: `a` None, `b` 64",)


def test_the_precision_and_the_place_of_a_run_are_no_caveats(write_run, compared):
    settings = {"precision": "bf16", "moments": "bf16", "run": "runs/b", "warmup_steps": 9}
    paths = [write_run("a", LOSSES), write_run("b", LOSSES, summary={"settings": settings})]
    assert compared(*paths).warnings == ()


def test_a_run_without_summary_is_said_to_be_compared_by_its_metrics(write_run, compared):
    paths = [write_run("a", LOSSES), write_run("b", LOSSES, summary=False)]
    assert compared(*paths).warnings == (
        "`b`: has no summary.json (still running, or killed); compared by its metrics alone,"
        " last step 2",
    )


def test_a_torn_line_is_told(write_run, compared):
    path = write_run("b", LOSSES)
    with (path / "metrics.csv").open("a") as metrics:
        metrics.write("3,2.")
    assert compared(write_run("a", LOSSES), path).warnings == (
        "`b`: its last line has no end and is left out",
    )


def test_different_lengths_are_told_with_what_is_compared(write_run, compared):
    assert compared(write_run("a", LOSSES), write_run("b", LOSSES[:2])).warnings == (
        "the runs have different steps, `a` 3 (0 to 2), `b` 2 (0 to 1);"
        " compared over the 2 common to all (0 to 1)",
    )


def test_a_step_with_nonfinite_gradients_and_a_finite_loss_is_told(write_run, compared):
    paths = [write_run("a", LOSSES), write_run("b", LOSSES, nonfinite={1})]
    comparison = compared(*paths)
    assert comparison.warnings == ("`b`: gradients not finite at step 1, in all at 1 of 3 steps",)
    assert not comparison.has_nonfinite


def test_plain_files_have_no_caveats(write_csv, compared):
    assert compared(write_csv("a.csv", LOSSES), write_csv("b.csv", [1, 1, 1])).warnings == ()

import json
import math

import pytest

from halfword.report.page import to_json, to_markdown

LOSSES = [4.0, 3.0, 2.5, 2.25]


def test_the_page_holds_sentence_tables_equality_warnings_and_plots(write_run, compared):
    paths = [
        write_run("fp32-master", LOSSES, sizes=(2, 4, 8, 2)),
        write_run("exact", LOSSES),
        write_run("bf16", [*LOSSES[:3], math.nan], summary={"settings": {"seed": 1}}),
    ]
    comparison = compared(*paths)
    page = to_markdown(comparison)
    assert page.startswith("# Comparison of `fp32-master`, `exact`, `bf16`\n\n`exact` equals ")
    assert comparison.sentence() in page
    assert "| exact | 2.2500 | 2.9375 | 0.6702 | 1.7500 | 500.0 | 250.0 |" in page
    assert "| fp32-master | 2.00 | 4.00 | 8.00 | 2.00 | 16.00 |" in page
    equality = "- `exact` equals `fp32-master` to the last bit over 4 steps (losses, weights, mast"
    assert f"## Equality\n\n{equality}" in page
    assert "- `bf16` differs from `fp32-master` from step 3.\n" in page
    assert "- `bf16`: loss is nan at step 3, not finite at 1 of 4 steps\n" in page
    assert "- seed differs: `fp32-master` 0, `exact` 0, `bf16` 1\n" in page
    assert page.endswith("![Loss by step](loss.png)\n\n![Bytes a parameter](memory.png)\n")


def test_pairs_without_the_first_run_are_told_where_they_are_equal(write_run, compared):
    paths = [write_run("a", LOSSES), write_run("b", [1.0] * 4), write_run("c", [1.0] * 4)]
    assert "\n- `c` equals `b` to the last bit over 4 steps" in to_markdown(compared(*paths))


def test_a_page_without_warnings_has_no_such_heading(write_run, compared):
    path = write_run("exact", LOSSES)
    assert "Warnings" not in to_markdown(compared(path, path))


def test_the_json_holds_what_the_page_says(write_run, compared):
    paths = [write_run("a", LOSSES), write_run("b", [*LOSSES[:3], math.nan])]
    comparison = compared(*paths)
    text = to_json(comparison)
    record = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert record["sentence"] == comparison.sentence()
    assert record["steps"] == {"count": 4, "first": 0, "last": 3}
    assert record["warnings"] == list(comparison.warnings) and record["has_nonfinite"] is True
    a, b = record["runs"]
    assert (a["label"], a["mean_loss"], b["mean_loss"]) == ("a", 2.9375, "nan")
    assert a["bytes_per_parameter"]["total"] == 14.004
    assert a["settings"]["learning_rate"] == 0.001 and a["digests"]["weights"] == "w0"
    assert b["nonfinite_losses"] == [[3, 3]]
    (pair,) = record["pairs"]
    assert (pair["first"], pair["second"], pair["equal"]) == ("a", "b", False)
    assert pair["first_difference"] == 3

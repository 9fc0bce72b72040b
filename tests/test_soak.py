"""Small counts of what `make soak` does at length."""

from pathlib import Path

import pytest

from soak import damage, kill_and_resume


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("soak")
    text = folder / "text.txt"
    text.write_text(Path(__file__).read_text() * 50)
    return folder, kill_and_resume(folder, text, count=5, seed=1)


def test_a_run_killed_at_random_moments_ends_with_equal_bits(killed):
    _, outcome = killed
    assert outcome["kills"] == 5
    assert outcome["equal"]


def test_nothing_writes_into_the_folder_after_a_kill(killed):
    assert killed[1]["quiet after a kill"]


def test_a_damaged_checkpoint_is_refused_or_loaded_right(killed):
    folder, _ = killed
    outcomes = damage(folder / "killed" / "checkpoints", folder / "damaged", count=20, seed=2)
    assert sum(outcomes.values()) == 20
    assert outcomes.get("loaded wrong", 0) == 0
    assert outcomes["refused"] >= 15

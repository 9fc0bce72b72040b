import shutil

import pytest
import torch

from halfword.checkpoint import CheckpointError, Writer, checkpoints, folder, latest, read


def _tensors(value=0.0):
    return {"model.w": torch.full((1000,), value), "optimizer.w.step": torch.tensor(value)}


def _steps(path):
    return [step for step, _ in checkpoints(path)]


def test_saves_hold_the_values_of_their_moment(tmp_path):
    writer = Writer(tmp_path)
    tensors = _tensors(1.0)
    writer.save(1, tensors, {})
    tensors["model.w"].fill_(2.0)  # training goes on
    writer.wait()
    _, saved, _ = read(tmp_path / "step-00000001")
    assert torch.equal(saved["model.w"], torch.full((1000,), 1.0))


def test_the_last_ones_and_every_so_manieth_are_kept(tmp_path):
    writer = Writer(tmp_path, keep=2, keep_every=30)
    for step in range(10, 100, 10):
        writer.save(step, _tensors(step), {})
    writer.wait()
    assert _steps(tmp_path) == [90, 80, 60, 30]


def test_a_step_that_is_saved_already_is_left_alone(tmp_path):
    writer = Writer(tmp_path)
    writer.save(5, _tensors(1.0), {})
    writer.save(5, _tensors(2.0), {})
    writer.wait()
    assert read(tmp_path / "step-00000005")[1]["model.w"][0] == 1.0


def test_buffers_are_kept_between_saves(tmp_path):
    writer = Writer(tmp_path)
    writer.save(1, _tensors(), {})
    first = writer._buffers["model.w"].data_ptr()
    writer.save(2, _tensors(), {})
    writer.wait()
    assert writer._buffers["model.w"].data_ptr() == first


def test_latest_is_found_by_content(tmp_path):
    writer = Writer(tmp_path, keep=3)
    for step in (1, 2, 3):
        writer.save(step, _tensors(step), {})
    writer.wait()
    (tmp_path / "step-00000003" / "state.json").write_text("{}")
    shutil.rmtree(tmp_path / "step-00000002")
    (tmp_path / "step-00000002").mkdir()
    (tmp_path / "step-99999999.txt").write_text("no checkpoint")
    found, problems = latest(tmp_path)
    assert found == tmp_path / "step-00000001"
    assert "state.json is damaged" in str(problems[0])
    assert "it has no manifest.json" in str(problems[1])
    assert latest(tmp_path / "nowhere") == (None, [])


def test_a_failed_save_is_told_once_and_costs_nothing(tmp_path, monkeypatch):
    writer = Writer(tmp_path)
    writer.save(1, _tensors(), {})
    writer.wait()

    def full(path):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(folder, "_sync", full)
        writer.save(2, _tensors(), {})
        with pytest.raises(OSError, match="No space left"):
            writer.wait()
    writer.wait()
    assert _steps(tmp_path) == [1]
    writer.save(3, _tensors(), {})
    writer.wait()
    assert _steps(tmp_path) == [3, 1]


def test_leftovers_of_a_killed_save_are_removed(tmp_path):
    (tmp_path / ".step-00000007.123.partial").mkdir()
    Writer(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_checkpoint_names_itself(tmp_path):
    with pytest.raises(CheckpointError, match="step-00000001: no checkpoint"):
        read(tmp_path / "step-00000001")

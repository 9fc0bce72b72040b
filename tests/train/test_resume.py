import csv
import os
import signal

import pytest
import torch
from rich.console import Console

from halfword.checkpoint import checkpoints, read_manifest
from halfword.errors import UsageError
from halfword.train import loop, resume
from halfword.train.config import PRESETS
from halfword.train.launch import configure
from halfword.train.loop import Stopped, run
from halfword.train.training import check_world

STOPS = (7, 20, 33, 46, 59)


@pytest.fixture
def train(tmp_path, tiny, monkeypatch):
    """Return a function that trains in a folder, in as many processes' worth as there are stops."""
    console = Console(quiet=True)
    plain_step = loop.train_step

    def train(name, stops=(), **changes):
        folder = tmp_path / name
        settings = {"num_steps": 60, "run": folder, "gradient_accumulation_steps": 2, **changes}
        config = tiny(**settings)

        def step(training, number):
            row = plain_step(training, number)
            if number + 1 in stops:
                os.kill(os.getpid(), signal.SIGTERM)
            return row

        monkeypatch.setattr(loop, "train_step", step)
        for _ in stops:
            with pytest.raises(Stopped) as stopped:
                run(config, console)
            assert stopped.value.exit_code == 128 + signal.SIGTERM
            config = configure(None, {"resume": "auto", "run": folder})
        run(config, console)
        return folder

    return train


def _rows(folder):
    with (folder / "metrics.csv").open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    return [{k: v for k, v in row.items() if not k.endswith("_s")} for row in rows]


def _fingerprint(folder):
    step, newest = next(iter(checkpoints(folder / "checkpoints")))
    return step, read_manifest(newest).fingerprint


@pytest.mark.parametrize("precision", PRESETS)
def test_stopping_and_resuming_five_times_equals_never_having_stopped(train, precision):
    """Losses, norms, weights, masters and moments, also across the end of an epoch."""
    whole = train("whole", precision=precision, eval_steps=20)
    stopped = train("stopped", stops=STOPS, precision=precision, eval_steps=20)
    assert _rows(whole) == _rows(stopped)
    assert _fingerprint(whole) == _fingerprint(stopped)
    assert _evaluations(whole) == _evaluations(stopped)


def _evaluations(folder):
    import json

    return json.loads((folder / "summary.json").read_text())["evaluations"]


@pytest.mark.parametrize("optimizer", ["adam", "lion", "sgd"])
def test_every_rule_resumes_exactly(train, optimizer):
    settings = {"optimizer": optimizer, "num_steps": 20, "learning_rate": 1e-3}
    whole, stopped = train("whole", **settings), train("stopped", stops=(9,), **settings)
    assert _rows(whole) == _rows(stopped)
    assert _fingerprint(whole) == _fingerprint(stopped)


def test_a_torn_last_line_and_rows_past_the_checkpoint_are_dropped(train):
    folder = train("run", stops=(10,), num_steps=20, save_steps=5, keep_checkpoints=9)
    whole = _rows(folder)
    with (folder / "metrics.csv").open("a") as file:
        file.write("20,1.25,0.0")
    config = configure(None, {"resume": str(folder / "checkpoints" / "step-00000015")})
    run(config, Console(quiet=True))
    assert _rows(folder) == whole
    assert [step for step, _ in checkpoints(folder / "checkpoints")] == [20, 15, 10, 5]


def test_checkpoints_of_a_course_that_is_given_up_are_removed(train):
    folder = train("run", num_steps=20, save_steps=5, keep_checkpoints=9)
    loop_config = configure(None, {"resume": str(folder / "checkpoints" / "step-00000010")})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "train_step", _raise)
        with pytest.raises(OSError, match="the machine went down"):
            run(loop_config, Console(quiet=True))
    assert [step for step, _ in checkpoints(folder / "checkpoints")] == [10, 5]


def _raise(*_):
    raise OSError("the machine went down")


def test_an_exact_run_goes_on_with_fp32_masters_to_the_same_bits(train):
    whole = train("whole", num_steps=20)
    half = train("half", num_steps=20, save_steps=10)
    config = configure(
        None,
        {"resume": str(half / "checkpoints" / "step-00000010"), "precision": "fp32-master"},
    )
    run(config, Console(quiet=True))
    assert _rows(whole) == _rows(half)


def test_a_preset_that_would_round_is_refused_by_name(train):
    folder = train("run", num_steps=10)
    config = configure(None, {"resume": "auto", "run": folder, "precision": "bf16"})
    with pytest.raises(UsageError, match="master weight: split to bf16 would round"):
        run(config, Console(quiet=True))
    assert [step for step, _ in checkpoints(folder / "checkpoints")] == [10]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"hidden_dim": 64}, "--hidden_dim 64: .*step-00000010 has 32; leave the option out"),
        ({"learning_rate": 0.5}, "--learning_rate 0.5: .*step-00000010 has 0.001; leave"),
        ({"seed": 3}, "--seed 3: .*step-00000010 has 0"),
    ],
)
def test_a_setting_that_must_stay_is_refused_by_name(train, flags, message):
    folder = train("run", num_steps=10)
    with pytest.raises(UsageError, match=message):
        configure(None, {"resume": "auto", "run": folder, **flags})


def test_another_text_is_refused(train, tmp_path):
    folder = train("run", num_steps=10)
    other = tmp_path / "other.txt"
    other.write_text("Something else altogether. " * 200)
    config = configure(None, {"resume": "auto", "run": folder, "data": str(other)})
    with pytest.raises(UsageError, match="was trained on another text; give the same one"):
        run(config, Console(quiet=True))


def test_other_threads_are_named_in_one_warning(train):
    folder = train("run", num_steps=10)
    config = configure(None, {"resume": "auto", "run": folder, "threads": 2, "num_steps": 12})
    with pytest.warns(UserWarning, match="resumed with threads 2 instead of 1: the run goes on"):
        run(config, Console(quiet=True))


@pytest.mark.parametrize(
    ("world_size", "flags", "kept", "dropped"),
    [
        (4, {}, (2, True), None),
        (3, {}, (None, True), "--shard_size 2: not for 3 processes in stage 3"),
        (2, {"zero_stage": 1}, (2, False), "--cpu_offload True: not for 2 processes in stage 1"),
        (
            1,
            {},
            (None, False),
            "--shard_size 2, --cpu_offload True: not for one process in stage 3",
        ),
    ],
)
def test_what_was_saved_for_another_world_is_dropped_with_a_warning(
    train, monkeypatch, recwarn, world_size, flags, kept, dropped
):
    folder = train("run", num_steps=1)
    saved = resume.saved_settings(folder / "checkpoints" / "step-00000001")
    saved |= {"zero_stage": 3, "shard_size": 2, "cpu_offload": True}
    monkeypatch.setattr(resume, "saved_settings", lambda _: saved)
    config = configure(None, {"resume": "auto", "run": folder, **flags}, world_size)
    assert (config.shard_size, config.cpu_offload) == kept
    warned = [str(warning.message) for warning in recwarn]
    assert warned == ([f"resumed without {dropped}"] if dropped else [])


def test_what_was_typed_for_another_world_is_refused(train):
    folder = train("run", num_steps=1)
    flags = {"resume": "auto", "run": folder, "shard_size": 2}
    config = configure(None, flags | {"zero_stage": 3}, world_size=3)
    with pytest.raises(UsageError, match="--shard_size 2: does not divide 3 processes"):
        check_world(config, 3)
    with pytest.raises(UsageError, match="--shard_size 2: stage 0 shards nothing"):
        configure(None, flags)


def test_auto_without_a_checkpoint_starts(train, tmp_path, tiny):
    flags = tiny(num_steps=3).model_dump(exclude_none=True)
    config = configure(None, flags | {"resume": "auto", "run": tmp_path / "fresh"})
    run(config, Console(quiet=True))
    assert len(_rows(tmp_path / "fresh")) == 3


def test_auto_passes_over_a_damaged_checkpoint_with_a_warning(train):
    folder = train("run", num_steps=10, save_steps=5)
    (folder / "checkpoints" / "step-00000010" / "state.json").write_text("{}")
    with pytest.warns(UserWarning, match="passing over .*step-00000010: state.json is damaged"):
        config = configure(None, {"resume": "auto", "run": folder})
    assert config.resume.endswith("step-00000005")


def test_a_folder_without_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"--resume .*: no checkpoint, for it has no manifest"):
        configure(None, {"resume": str(tmp_path)})


def test_another_run_is_not_continued_elsewhere(train, tmp_path):
    folder = train("run", num_steps=5)
    with pytest.raises(UsageError, match="is not the run of --resume"):
        configure(None, {"resume": str(folder), "run": tmp_path / "elsewhere"})


def test_a_diverged_run_is_saved_and_resumed(train, monkeypatch):
    """NaN losses and evaluations survive JSON and CSV."""
    settings = {"learning_rate": 1e30, "max_grad_norm": 0.0, "num_steps": 8, "eval_steps": 2}
    whole, stopped = train("whole", **settings), train("stopped", stops=(5,), **settings)
    assert "nan" in {row["loss"] for row in _rows(whole)}
    assert _rows(whole) == _rows(stopped)
    assert _fingerprint(whole) == _fingerprint(stopped)


def test_the_random_state_is_restored(train):
    folder = train("run", stops=(5,), num_steps=6)
    expected = torch.get_rng_state()  # what the run seeded
    torch.manual_seed(99)
    run(configure(None, {"resume": "auto", "run": folder, "num_steps": 7}), Console(quiet=True))
    assert torch.equal(torch.get_rng_state(), expected)


def test_a_run_whose_tokenizer_is_gone_resumes_with_its_own_copy(train, tmp_path):
    from halfword.train.tokenizer import ByteTokenizer

    file = tmp_path / "elsewhere.json"
    file.write_text(ByteTokenizer().to_json())
    folder = train("run", num_steps=4, tokenizer=str(file))
    file.unlink()
    run(configure(None, {"resume": str(folder), "num_steps": 6}), Console(quiet=True))
    assert len(_rows(folder)) == 6


def test_fewer_steps_than_were_done_are_refused(train):
    folder = train("run", num_steps=10)
    with pytest.raises(UsageError, match="--num_steps 5: .*step-00000010 has done 10; give more"):
        configure(None, {"resume": str(folder), "num_steps": 5})


def test_a_checkpoint_is_found_by_a_short_relative_path(train, monkeypatch):
    folder = train("run", num_steps=4)
    monkeypatch.chdir(folder / "checkpoints")
    config = configure(None, {"resume": "step-00000004", "num_steps": 5})
    assert config.run == folder.resolve()


def test_a_checkpoint_outside_its_run_is_refused(train, tmp_path):
    folder = train("run", num_steps=4)
    lone = tmp_path / "lone" / "step-00000004"
    (folder / "checkpoints" / "step-00000004").rename(tmp_path / "moved")
    lone.parent.mkdir()
    (tmp_path / "moved").rename(lone)
    with pytest.raises(UsageError, match="is not in its run's folder; put it back into"):
        configure(None, {"resume": str(lone)})


def test_a_full_disk_is_told_in_one_line(train, tiny, tmp_path, monkeypatch):
    from torch.distributed.checkpoint.api import CheckpointException

    from halfword.checkpoint import CheckpointError, tensors

    def full(*args, **kwargs):
        raise CheckpointException("write", {0: (OSError(28, "No space left on device"), None)})

    monkeypatch.setattr(tensors, "save", full)
    with pytest.raises(CheckpointError, match="could not be written: .*No space left on device"):
        train("run", num_steps=2)

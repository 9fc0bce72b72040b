"""Trackers hold every step once, also of a run that was stopped and resumed."""

import math
import os
import shutil
import signal

import pytest
from rich.console import Console

from halfword.checkpoint import checkpoints
from halfword.cli import main
from halfword.train import loop, trackers
from halfword.train.files import Files
from halfword.train.launch import configure
from halfword.train.loop import Stopped, run
from halfword.train.metrics import Row
from halfword.train.training import build

SCALARS = {"train/loss", "train/lr", "train/grad_norm", "train/tokens_per_s"}


def make_row(step, stalled=math.nan):
    return Row(step, 2.5, 1e-3, 0.5, 64, 0.25, 0.1, 0, stalled)


def test_the_scalars_of_a_step_have_a_stalled_share_where_one_was_counted():
    expected = dict(zip(sorted(SCALARS), [0.5, 2.5, 1e-3, 256.0], strict=True))
    assert trackers.of_row(make_row(0)) == expected
    assert trackers.of_row(make_row(0, 0.125)) == expected | {"train/stalled": 0.125}


def test_a_resumed_run_begins_with_what_it_has(tmp_path, monkeypatch):
    begun = {}
    monkeypatch.setitem(trackers.TRACKERS, "wandb", lambda f, c, p: begun.update(f=f, c=c, p=p))
    evaluations = [{"step": 1, "loss": 2.0}]
    trackers.begin(["wandb"], tmp_path, {"seed": 0}, [make_row(0), make_row(1)], evaluations)
    assert (begun["f"], begun["c"]) == (tmp_path, {"seed": 0})
    assert begun["p"][0].keys() == SCALARS
    assert begun["p"][1] == trackers.of_row(make_row(1)) | {"eval/loss": 2.0}


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_package_is_one_line_and_leaves_nothing(name, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert main(["train", "--run", str(tmp_path / "run"), "--log_to", name]) == 2
    fix = f"needs a package that is not there; pip install 'halfword[{name}]'"
    assert capsys.readouterr().err == f"halfword train: --log_to {name}: {fix}\n"
    (tmp_path / "some.toml").write_text(f'log_to = ["{name}"]')
    assert main(["train", "--run", str(tmp_path / "run"), "--config", f"{tmp_path}/some.toml"]) == 2
    assert capsys.readouterr().err == f"halfword train: --log_to {name}: {fix}\n"
    assert not (tmp_path / "run").exists()


def test_wandb_without_a_key_is_one_line_and_leaves_nothing(tmp_path, capsys, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="needs halfword[wandb]")
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    assert main(["train", "--run", str(tmp_path / "run"), "--log_to", "wandb"]) == 2
    wandb.teardown()  # or it remembers for later tests
    error = capsys.readouterr().err
    assert error.startswith("halfword train: --log_to wandb: cannot begin: No API key configured")
    assert error.count("\n") == 1 and not (tmp_path / "run").exists()


def test_an_unknown_tracker_is_refused_by_name(capsys):
    assert main(["train", "--log_to", "tensorboard", "--log_to", "paper"]) == 2
    expected = "halfword train: --log_to paper: should be 'tensorboard' or 'wandb'\n"
    assert capsys.readouterr().err == expected


def test_the_option_may_be_repeated_or_stand_in_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(trackers, "check", lambda names: None)
    file = tmp_path / "some.toml"
    file.write_text('log_to = ["wandb"]\n')
    assert configure(file, {}).log_to == ["wandb"]
    assert configure(file, {"log_to": ["tensorboard", "wandb"]}).log_to == ["tensorboard", "wandb"]
    assert configure(None, {}).log_to == []


@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_first_rank_has_trackers(rank, tmp_path, tiny, monkeypatch):
    places = []
    monkeypatch.setitem(trackers.TRACKERS, "wandb", lambda folder, *_: places.append(folder))
    training = build(tiny(log_to=["wandb", "wandb"]))
    training.world.rank = rank
    Files(tmp_path, training).__enter__()
    assert places == ([tmp_path] if rank == 0 else [])


@pytest.fixture
def stopped_and_resumed(tmp_path, tiny, monkeypatch):
    """Train with a tracker up to step 4, lose the checkpoint there, and go on from step 3."""

    def train(name):
        folder, console = tmp_path / "run", Console(quiet=True)
        config = tiny(run=folder, log_to=[name], num_steps=6, save_steps=3, eval_steps=2)
        plain_step = loop.train_step

        def step(training, number):
            if number == 4:
                os.kill(os.getpid(), signal.SIGTERM)
            return plain_step(training, number)

        with monkeypatch.context() as patch:
            patch.setattr(loop, "train_step", step)
            with pytest.raises(Stopped):
                run(config, console)
        (_, newest), (before, _) = checkpoints(folder / "checkpoints")
        assert before == 3
        shutil.rmtree(newest)
        run(configure(None, {"resume": "auto", "run": folder}), console)
        return folder

    return train


def losses_of(folder):
    lines = (folder / "metrics.csv").read_text().splitlines()[1:]
    return [float(line.split(",")[1]) for line in lines]


def test_tensorboard_has_every_step_once_after_a_resume(stopped_and_resumed):
    pytest.importorskip("tensorboard", reason="needs halfword[tensorboard]")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = stopped_and_resumed("tensorboard")
    events = EventAccumulator(str(folder / "tensorboard"), purge_orphaned_data=False).Reload()
    assert set(events.Tags()["scalars"]) == SCALARS | {"train/stalled", "eval/loss"}
    losses = events.Scalars("train/loss")
    assert [event.step for event in losses] == [0, 1, 2, 3, 4, 5]
    assert [event.value for event in losses] == pytest.approx(losses_of(folder), rel=1e-6)
    assert [event.step for event in events.Scalars("eval/loss")] == [1, 3, 5]
    assert [event.step for event in events.Scalars("train/stalled")] == [0]


def test_wandb_goes_on_with_the_same_run_after_a_resume(stopped_and_resumed, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="needs halfword[wandb]")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    begin, log = wandb.init, wandb.Run.log
    identities, steps = [], []

    def init(**arguments):
        steps.append([])
        identities.append(arguments["id"])
        return begin(**arguments)

    def record(wandb_run, scalars, step):
        steps[-1] += [step] * ("train/loss" in scalars)
        log(wandb_run, scalars, step=step)

    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.setattr(wandb.Run, "log", record)
    folder = stopped_and_resumed("wandb")
    assert steps == [[0, 1, 2, 3, 4], [3, 4, 5]]
    assert identities == [(folder / "wandb" / "id").read_text()] * 2
    assert len(list(folder.glob("wandb/offline-run-*/*.wandb"))) == 2

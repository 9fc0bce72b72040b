"""A run's full state: into a checkpoint, and back to the last bit."""

import csv
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halfword.checkpoint import CheckpointError, flatten, latest, read, targets, verify
from halfword.checkpoint import restore as restore_contents
from halfword.errors import UsageError
from halfword.train import record, run_folder
from halfword.train.metrics import Row
from halfword.train.training import Training

AUTO = "auto"
RANDOM = "random."
STATE = "state.json"


def locate(where: str, run: Path, argument: str = "--resume") -> Path | None:
    """Return the checkpoint that an argument names, verified; None if `auto` finds none.

    Args:
        where: `auto`, a run's folder, or one checkpoint.
        run: the folder in which `auto` looks.
        argument: what a user knows it by.

    Raises:
        UsageError: the folder has no checkpoint that verifies.
    """
    folder = run if where == AUTO else Path(where)
    if not (folder / run_folder.CHECKPOINTS).is_dir() and where != AUTO:
        try:
            verify(folder)
        except CheckpointError as error:
            raise UsageError(argument, folder, error.problem) from None
        return folder.resolve()  # its run is two folders up
    found, problems = latest(folder / run_folder.CHECKPOINTS)
    if found is None and (problems or where != AUTO):
        problem = f"; {problems[0]}" if problems else ""  # the newest one's
        raise UsageError(argument, where, f"holds no checkpoint to use{problem}")
    for damaged in problems:
        warnings.warn(f"passing over {damaged}", stacklevel=2)
    return found


def saved_settings(checkpoint: Path) -> dict[str, Any]:
    """Return the settings of the run that made a verified checkpoint."""
    settings: dict[str, Any] = json.loads((checkpoint / STATE).read_text())["settings"]
    return settings


def contents(training: Training) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return all tensors of a run, not copied, and the rest of its state as JSON values."""
    tensors, settings = flatten(training.model, training.optimizer)
    tensors |= {f"{RANDOM}cpu": torch.get_rng_state()}
    if training.device.type != "cpu":
        module = torch.get_device_module(training.device)
        tensors[f"{RANDOM}{training.device.type}"] = module.get_rng_state(training.device)
    scheduler = {
        key: value for key, value in training.scheduler.state_dict().items() if key != "lr_lambdas"
    }
    state = {
        "settings": training.config.to_toml(),
        "precision": training.config.formats._asdict(),
        "contents": settings,
        "scheduler": scheduler,
        "micro_batches": training.micro_batches,
        "evaluations": [
            evaluation | {"loss": repr(evaluation["loss"])} for evaluation in training.evaluations
        ],  # as text, for JSON has no NaN
        "seconds": training.seconds(),
        "corpus_sha256": training.corpus["sha256"],
        "environment": _environment(training),
    }
    return tensors, state


def restore(training: Training, checkpoint: Path, run: Path) -> None:
    """Bring a freshly built run to the state of a checkpoint.

    Args:
        training: built from the same settings; its formats may differ where that is exact.
        checkpoint: the checkpoint's folder.
        run: the run's folder, whose metrics.csv holds the steps before.

    Raises:
        UsageError: the checkpoint, the text or metrics.csv do not belong to this run.
    """
    try:
        manifest, tensors, state = read(checkpoint, targets(training.model), training.world.ranks)
        restore_contents(training.model, training.optimizer, tensors, state["contents"])
    except CheckpointError as error:
        raise UsageError("--resume", checkpoint, error.problem) from None
    except ValueError as error:
        problem, _, rounds = str(error).partition("; make the optimizer")
        fix = "; leave --precision, --master_weights and --moments out" if rounds else ""
        raise UsageError("--resume", checkpoint, problem + fix) from None
    if state["corpus_sha256"] != training.corpus["sha256"]:
        raise UsageError("--resume", checkpoint, "was trained on another text; give the same one")
    training.scheduler.load_state_dict(state["scheduler"] | {"lr_lambdas": [None] * 2})
    torch.set_rng_state(tensors[f"{RANDOM}cpu"])
    device_state = tensors.get(f"{RANDOM}{training.device.type}")
    if training.device.type != "cpu" and device_state is not None:
        torch.get_device_module(training.device).set_rng_state(device_state, training.device)
    training.rows = _read_rows(run / "metrics.csv", manifest.step)
    training.evaluations = [
        evaluation | {"loss": float(evaluation["loss"])} for evaluation in state["evaluations"]
    ]
    training.micro_batches = state["micro_batches"]
    training.earlier_seconds = state["seconds"]
    _warn_of_changes(state["environment"], _environment(training))


def _read_rows(file: Path, steps: int) -> list[Row]:
    """Return the rows of the steps before a checkpoint; what follows them is left out."""
    kinds = Row.__annotations__
    try:
        with file.open(newline="", encoding="utf-8") as lines:
            table = [line for _, line in zip(range(steps), csv.DictReader(lines), strict=False)]
        table = [{"stalled": "nan"} | line for line in table]  # a column that once was not there
        rows = [Row(**{name: kinds[name](line[name]) for name in Row._fields}) for line in table]
    except (OSError, KeyError, TypeError, ValueError):
        fix = "is missing or damaged; it holds the steps before the checkpoint"
        raise UsageError("--resume", file, fix) from None
    if [row.step for row in rows] != list(range(steps)):
        raise UsageError("--resume", file, f"does not hold the {steps} steps before the checkpoint")
    return rows


def _environment(training: Training) -> dict[str, Any]:
    """Return what decides the bits of a run beside its settings."""
    device = record.describe(training.device, training.config.threads)
    kept = {key: device[key] for key in ("kind", "threads", "bf16_matmul")}
    kept |= {"world_size": training.world.size, "zero_stage": training.config.zero_stage}
    return kept | {key: value for key, value in record.versions().items() if key != "halfword"}


def _warn_of_changes(saved: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    changes = [
        f"{name} {value} instead of {saved.get(name)}"
        for name, value in here.items()
        if saved.get(name) != value
    ]
    if changes:
        text = ", ".join(changes)
        warnings.warn(f"resumed with {text}: the run goes on, its bits may differ", stacklevel=2)

"""The settings of a run, also of one that goes on from a checkpoint or starts from a model."""

import warnings
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

from rich.console import Console

from halfword.checkpoint import read_manifest
from halfword.errors import UsageError
from halfword.train import deepspeed, pretrained, resume, run_folder, trackers
from halfword.train.config import PLACES, TrainConfig
from halfword.train.reading import load_config, read_settings
from halfword.train.training import check_world, is_available

# What may differ from the run that is resumed; the text is compared by its hash.
FREE = PLACES | {
    *("precision", "master_weights", "moments", "num_steps", "device", "threads"),
    *("data", "dataset", "eval_data", "init", "activation_checkpointing", "warmup_steps"),
    *("stall_steps", "gradient_accumulation_steps"),
    *("zero_stage", "shard_size", "reduce_dtype", "cpu_offload", "timeout"),
    *("eval_steps", "save_steps", "keep_checkpoints", "keep_every", "log_interval", "log_to"),
}
LEAVE_OUT = "leave the option out"
WIKITEXT_103 = "Salesforce/wikitext/wikitext-103-raw-v1"


def configure(
    file: Path | None,
    flags: Mapping[str, Any],
    world_size: int = 1,
    fixed: Set[str] = frozenset(),
) -> TrainConfig:
    """Merge defaults, the settings of what the run goes on from, the TOML file and flags.

    Args:
        file: the TOML file.
        flags: what the command line gives.
        world_size: the number of processes, which saved settings of sharding may not fit.
        fixed: those of the flags that must not change a run that is resumed, even if others may.

    Raises:
        UsageError: a setting that is wrong, or differs from what it must be the same as, or that
            needs what is not there.
    """
    given = read_settings(file, flags)
    if given.get("resume") is not None:
        config = _resumed(given, file, flags, world_size, fixed)
    else:
        config = _started(given, file, flags)
    trackers.check(config.log_to)
    return config


def settle(
    file: Path | None,
    deepspeed_file: Path | None,
    flags: Mapping[str, Any],
    world_size: int,
    console: Console,
) -> TrainConfig:
    """Give the settings of a command line, of whichever of the two kinds of file it names.

    Raises:
        UsageError: both files are named, or a setting is wrong.
    """
    if deepspeed_file is None:
        return configure(file, flags, world_size)
    if file is not None:
        fix = f"give it or --config {file}, not both; options add to either"
        raise UsageError("--deepspeed_config", deepspeed_file, fix)
    return _configure_from_deepspeed(deepspeed_file, flags, world_size, console)


def with_real_data(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Take the data set that DeepSpeed's example means by its --use_real_data."""
    for name in ("data", "dataset"):
        if name in flags:
            fix = f"is --dataset {WIKITEXT_103}; give it or --{name}, not both"
            raise UsageError("--use_real_data", True, fix)
    return {**flags, "dataset": WIKITEXT_103}


def _configure_from_deepspeed(
    file: Path, flags: Mapping[str, Any], world_size: int, console: Console
) -> TrainConfig:
    """Do as `configure` with a JSON file of DeepSpeed's, and print what becomes of each key.

    A run that is resumed must have had the same settings: what is to change, flags change.

    Raises:
        UsageError: a key or a flag that is wrong, or cannot be honoured.
    """
    translation = deepspeed.translate(file, flags, world_size)
    settings = {**translation.settings, **flags}
    if "precision" in flags:  # it stands for both formats
        settings = {key: settings[key] for key in settings if key != "moments" or key in flags}
    try:
        config = configure(None, settings, world_size, settings.keys() - flags.keys())
        check_world(config, world_size)
    except UsageError as error:
        raise translation.renamed(error) from None
    deepspeed.show(translation, console)
    return config


def _started(given: Mapping[str, Any], file: Path | None, flags: Mapping[str, Any]) -> TrainConfig:
    if given.get("init") is not None:
        return _initialized(given, file, flags)
    return load_config(file, flags)


def _resumed(
    given: Mapping[str, Any],
    file: Path | None,
    flags: Mapping[str, Any],
    world_size: int,
    fixed: Set[str],
) -> TrainConfig:
    where = str(given["resume"])
    run = Path(given.get("run") or Path("runs") / given.get("precision", "exact"))
    checkpoint = resume.locate(where, run)
    if checkpoint is None:  # nothing to go on from: start, in place of what the folder holds
        start = {"run": run, "resume": None, "overwrite": True}
        return _started(given, file, flags).model_copy(update=start)
    own_run = checkpoint.parent.parent
    if not (own_run / "metrics.csv").is_file():
        fix = "is not in its run's folder; put it back into the run's checkpoints/"
        raise UsageError("--resume", checkpoint, fix)
    if given.get("run") and run.resolve() != own_run.resolve():
        raise UsageError("--run", run, f"is not the run of --resume {where}, which is {own_run}")
    saved = _fitting(resume.saved_settings(checkpoint), given, world_size)
    before = TrainConfig(**saved)
    for name in TrainConfig.model_fields.keys() & (given.keys() - FREE | fixed):
        expected = getattr(before, name)
        fix = f"give --{name} {expected}, which wins" if name in fixed else LEAVE_OUT
        _check_same(name, given[name], expected, checkpoint, fix)
    if not is_available(str(saved.get("device"))):
        del saved["device"]
    if "precision" in given:  # it stands for both formats
        saved = {key: saved[key] for key in saved.keys() - {"master_weights", "moments"}}
    if saved["tokenizer"] != "bytes" and not saved["tokenizer"].startswith("bpe:"):
        saved["tokenizer"] = str(own_run / run_folder.TOKENIZER)  # the original may be gone
    config = load_config(file, flags, saved)
    step = read_manifest(checkpoint).step
    if config.num_steps < step:
        raise UsageError(
            "--num_steps", config.num_steps, f"{checkpoint} has done {step}; give more"
        )
    return config.model_copy(update={"run": own_run, "resume": str(checkpoint)})


def _fitting(saved: Mapping[str, Any], given: Mapping[str, Any], world_size: int) -> dict[str, Any]:
    """Return saved settings, and warn of those of another world that are left out for this one."""
    stage = {**saved, **given}.get("zero_stage", 0)
    misfits = {
        "shard_size": stage == 0 or world_size % saved.get("shard_size", 1) > 0,
        "cpu_offload": stage in (0, 1) or world_size == 1,
    }
    dropped = [
        name for name, misfit in misfits.items() if misfit and saved.get(name) and name not in given
    ]
    if dropped:
        names = ", ".join(f"--{name} {saved[name]}" for name in dropped)
        world = f"{world_size} processes" if world_size > 1 else "one process"
        warnings.warn(f"resumed without {names}: not for {world} in stage {stage}", stacklevel=2)
    return {name: value for name, value in saved.items() if name not in dropped}


def _initialized(
    given: Mapping[str, Any], file: Path | None, flags: Mapping[str, Any]
) -> TrainConfig:
    folder = Path(str(given["init"]))
    shape = pretrained.read_shape(folder)
    for name in shape.keys() & given.keys():
        _check_same(name, given[name], shape[name], folder, LEAVE_OUT)
    tokenizer = {"tokenizer": str(folder)} if (folder / "tokenizer.json").exists() else {}
    return load_config(file, flags, shape | tokenizer)


def _check_same(name: str, value: Any, expected: Any, where: Path, fix: str) -> None:
    if value != expected:
        raise UsageError(f"--{name}", value, f"{where} has {expected}; {fix}")

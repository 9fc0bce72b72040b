"""The settings of a run, also of one that goes on from a checkpoint or starts from a model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from halfword.checkpoint import read_manifest
from halfword.errors import UsageError
from halfword.train import pretrained, resume, run_folder, trackers
from halfword.train.config import PLACES, TrainConfig
from halfword.train.reading import load_config, read_settings
from halfword.train.training import is_available

# What may differ from the run that is resumed; the text is compared by its hash.
FREE = PLACES | {
    *("precision", "master_weights", "moments", "num_steps", "device", "threads"),
    *("data", "dataset", "eval_data", "init", "activation_checkpointing", "warmup_steps"),
    *("stall_steps", "gradient_accumulation_steps"),
    *("zero_stage", "shard_size", "reduce_dtype", "cpu_offload", "timeout"),
    *("eval_steps", "save_steps", "keep_checkpoints", "keep_every", "log_interval", "log_to"),
}


def configure(file: Path | None, flags: Mapping[str, Any]) -> TrainConfig:
    """Merge defaults, the settings of what the run goes on from, the TOML file and flags.

    Raises:
        UsageError: a setting that is wrong, or differs from what it must be the same as, or that
            needs what is not there.
    """
    given = read_settings(file, flags)
    resumes = given.get("resume") is not None
    config = (_resumed if resumes else _started)(given, file, flags)
    trackers.check(config.log_to)
    return config


def _started(given: Mapping[str, Any], file: Path | None, flags: Mapping[str, Any]) -> TrainConfig:
    if given.get("init") is not None:
        return _initialized(given, file, flags)
    return load_config(file, flags)


def _resumed(given: Mapping[str, Any], file: Path | None, flags: Mapping[str, Any]) -> TrainConfig:
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
    saved = resume.saved_settings(checkpoint)
    before = TrainConfig(**saved)
    for name in TrainConfig.model_fields.keys() & given.keys() - FREE:
        _check_same(name, given[name], getattr(before, name), checkpoint)
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


def _initialized(
    given: Mapping[str, Any], file: Path | None, flags: Mapping[str, Any]
) -> TrainConfig:
    folder = Path(str(given["init"]))
    shape = pretrained.read_shape(folder)
    for name in shape.keys() & given.keys():
        _check_same(name, given[name], shape[name], folder)
    tokenizer = {"tokenizer": str(folder)} if (folder / "tokenizer.json").exists() else {}
    return load_config(file, flags, shape | tokenizer)


def _check_same(name: str, value: Any, expected: Any, where: Path) -> None:
    if value != expected:
        raise UsageError(f"--{name}", value, f"{where} has {expected}; leave the option out")

"""Where low precision must show: fine-tuning, with updates below half a BF16 step.

    python benchmarks/finetuning.py                        # 5 minutes on two cores
    python benchmarks/finetuning.py --data wikitext-2/     # on other text
    python benchmarks/finetuning.py --init MODEL --data TEXT/ --device cuda --seq_length 1024

Takes the model that --init names, or trains one under FP32 masters as the study of convergence
does, and fine-tunes it under every preset on text that it has not seen. Writes
benchmarks/results/finetuning/, a run at a time; stopped, the same command goes on. Fails where a
preset that should follow FP32 masters does not.
"""

import argparse
import hashlib
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

import convergence
import tables
from differences import BASELINE, Verdict, grouped, tuning_verdicts
from halfword.train.config import TrainConfig
from halfword.train.export import export
from halfword.train.loop import Stop, evaluate
from halfword.train.metrics import write_whole
from halfword.train.pretrained import read_shape
from halfword.train.progress import Display
from halfword.train.training import build
from results import RESULTS
from study import Study, parse, report, train

SETTINGS = {
    "tokenizer": "bytes",  # the model's own, without the detour through its file
    "seq_length": "96",
    "batch_size": "4",
    "num_steps": "300",
    "lr_schedule": "constant",
    "lr_warmup_steps": "0",
    "weight_decay": "0",
    "beta2": "0.999",
    "max_grad_norm": "0",
    "save_steps": "500",
    "log_interval": "500",
    "seed": "0",
}
OF_THE_MODEL = ("num_layers", "hidden_dim", "ffn_dim", "num_heads", "device", "threads")
OTHER_CHARACTERS = 1_000_000
# Packages that the study's text has, that are tables of codes, or that not every Python has.
LEFT_OUT = {
    "__phello__",
    "pydoc_data",
    "encodings",
    "test",
    "idlelib",
    "site-packages",
    "dist-packages",
}


def main() -> int:
    """Run what is left of the study, print its table, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--learning_rates", nargs="+", default=["1e-6", "1e-5"], metavar="RATE")
    taken = {"learning_rate"}
    arguments, options = parse(parser, RESULTS / "finetuning", SETTINGS, taken)
    arms = [
        {"learning_rate": rate, "precision": preset}
        for rate in arguments.learning_rates
        for preset in arguments.presets
    ]
    if "init" not in options:
        options["init"] = str(trained_model(arguments.runs, options))
    if not options.keys() & {"data", "dataset"}:
        options["data"] = str(other_text(arguments.runs))
    study = Study(arms, options, arguments.output, arguments.runs, start(options))
    results = study.run()
    print(tables.finetuning(results))
    return report(
        Verdict(f"learning rate {rate}, {text}", kept)
        for rate, runs in grouped(results, "learning_rate").items()
        for text, kept in tuning_verdicts(runs)
    )


def trained_model(runs: Path, options: Mapping[str, str]) -> Path:
    """Train the model to start from and export its masters, unless that was done."""
    model = runs / "model"
    if not model.exists():
        given = {option: options[option] for option in OF_THE_MODEL if option in options}
        same = {"precision": BASELINE, "beta2": SETTINGS["beta2"], "seed": SETTINGS["seed"]}
        train(runs / "model-run", {**convergence.SETTINGS, **given, **same})
        export(runs / "model-run", model, "fp32", Console())
    return model


def other_text(runs: Path) -> Path:
    """Write the packages of the standard library, by name, up to a cap."""
    library = Path(sysconfig.get_path("stdlib"))
    files = [file for file in sorted(library.glob("*/*.py")) if file.parent.name not in LEFT_OUT]
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)[:OTHER_CHARACTERS]
    runs.mkdir(parents=True, exist_ok=True)
    write_whole(runs / "other.txt", text)
    return runs / "other.txt"


def start(options: Mapping[str, str]) -> dict[str, Any]:
    """Say what all runs start from: a digest of the model, its loss on the held-out text."""
    folder = Path(options["init"])
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        digest.update(file.read_bytes())
    words = {option: value or True for option, value in options.items()}  # a switch is ""
    config = TrainConfig.model_validate(read_shape(folder) | words, strict=False)
    training = build(config)
    with Display(Console(quiet=True), config.num_steps, config.log_interval) as display:
        evaluate(training, 0, display, Stop())
    return {"model": digest.hexdigest(), "eval_loss": training.evaluations[0]["loss"]}


if __name__ == "__main__":
    sys.exit(main())

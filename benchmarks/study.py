"""What the studies share: arms, each trained once, and the small result that each leaves.

A run is scratch, under runs/. Its result stays: NAME.json with what the tables need, NAME.csv with
its loss, means of ten steps. A finished arm is not repeated, an interrupted one goes on from its
checkpoint: to go on with a study is to give its command again.
"""

import argparse
import hashlib
import json
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np

from differences import BASELINE, Losses, Result, Verdict, figures, thinned
from halfword import cli
from halfword.report.caveats import UNREMARKABLE_SETTINGS
from halfword.train.config import PLACES, PRESETS, TrainConfig
from halfword.train.metrics import write_json, write_whole
from results import commit

# May be paths. Of those only the end is kept: the rest is one machine's.
PATHS = ("data", "eval_data", "tokenizer", "init")
FORMAT_OPTIONS = {"precision", "master_weights", "moments"}
ALIKE = ("options", "versions", "device", "corpus", "start")  # over all results of a study


@dataclass(frozen=True)
class Study:
    """Arms that differ in a few options of `halfword train`, all as words of a command line."""

    arms: Sequence[dict[str, str]]  # what sets each apart
    options: Mapping[str, str]  # what all have; a switch is ""
    output: Path  # where results stay
    runs: Path  # scratch
    start: Mapping[str, Any] | None = None  # what all go on from, where that is a model

    def run(self) -> list[Result]:
        """Train what has no result yet, arm by arm; return all results in the order of the arms.

        Raises:
            SystemExit: a run was interrupted or refused, or results do not belong together.
        """
        results = [result for arm in self.arms if (result := self._known(arm))]
        self._check_alike(results)
        for arm in self.arms:
            if self._known(arm):
                continue
            self._announce(arm, results)
            train(self.runs / name(arm), {**self.options, **arm})
            results.append(self._record(arm))
            self._check_alike(results)
        return [self._known(arm) for arm in self.arms]

    def _known(self, arm: dict[str, str]) -> Result:
        """Return an arm's result, empty if it has none."""
        file = self._file(arm, "json")
        return json.loads(file.read_text()) if file.exists() else {}

    def _file(self, arm: dict[str, str], kind: str) -> Path:
        return self.output / f"{name(arm)}.{kind}"

    def _record(self, arm: dict[str, str]) -> Result:
        """Keep what the tables need, then drop the run's checkpoints."""
        run = self.runs / name(arm)
        result = {"arm": arm, "options": _kept(self.options), "start": self.start}
        losses, found = _read(run)
        points = [f"{step},{loss:.5f}\n" for step, loss in thinned(losses)]
        self.output.mkdir(parents=True, exist_ok=True)
        write_whole(self._file(arm, "csv"), "".join(["steps,loss\n", *points]))
        write_json(self._file(arm, "json"), result | {"commit": commit()} | found)
        shutil.rmtree(run / "checkpoints")
        return self._known(arm)

    def _check_alike(self, results: Sequence[Result]) -> None:
        """Stop where two results differ in more than their arms: nothing could be said of them."""
        expected = {"options": _kept(self.options), "start": self.start}
        for result in results:
            for key in ALIKE:
                first = expected.setdefault(key, result[key])
                if result[key] != first:
                    file = self._file(result["arm"], "json")
                    fix = f"{result[key]} instead of {first}; remove it, or name another --output"
                    sys.exit(f"{file}: has {key} {fix}")

    def _announce(self, arm: dict[str, str], results: Sequence[Result]) -> None:
        number, spent = len(results) + 1, [float(result["seconds"]) for result in results]
        what = ", ".join(f"{key} {value}" for key, value in arm.items())
        left = "time left: known after the first run"
        if spent:
            seconds = sum(spent) / len(spent) * (len(self.arms) - len(spent))
            left = f"about {seconds / 60:.0f} min left"
        print(f"run {number} of {len(self.arms)}: {what}; {left}", flush=True)


def train(run: Path, options: Mapping[str, str]) -> None:
    """Run `halfword train`, from the newest checkpoint of the run's folder if it has one.

    Raises:
        SystemExit: the run was interrupted, its state saved; or refused, and it was said why.
    """
    words = ["train", "--run", str(run), "--resume", "auto"]
    for option, value in options.items():
        words += [f"--{option}", value] if value else [f"--{option}"]
    try:
        code = cli.main(words)
    except KeyboardInterrupt:  # while the trainer did not listen yet, or no longer
        code = cli.INTERRUPTED
    if code > 128:
        print("interrupted; the same command goes on from here", file=sys.stderr)
    if code:
        sys.exit(code)


def name(arm: Mapping[str, str]) -> str:
    """Name an arm's files.

    >>> name({"beta2": "0.999", "seed": "0", "precision": "exact"})
    'beta2-0.999-seed-0-exact'
    """
    words = [f"{key}-{value}" for key, value in arm.items() if key != "precision"]
    return "-".join([*words, arm["precision"]])


def report(verdicts: Iterable[Verdict]) -> int:
    """Print each bar; return 1 if one is missed."""
    missed = 0
    for text, kept in verdicts:
        print(f"{text}: {'kept' if kept else 'MISSED'}")
        missed += not kept
    return int(missed > 0)


def parse(
    parser: argparse.ArgumentParser, output: Path, defaults: Mapping[str, str], taken: set[str]
) -> tuple[argparse.Namespace, dict[str, str]]:
    """Parse a study's command line.

    Args:
        parser: with the options of this study alone.
        output: where results go unless another folder is named.
        defaults: of the trainer's options.
        taken: the trainer's options that the study sets itself, and does not offer.

    Returns:
        What was parsed, and the trainer's options in it.
    """
    help = f"also without it {BASELINE}, which all are held against"
    presets = list(PRESETS)
    parser.add_argument("--presets", nargs="+", default=presets, choices=presets, help=help)
    parser.add_argument("--output", type=Path, default=output, help="folder of the results")
    parser.add_argument("--runs", type=Path, help="folder of the runs [default: runs/OUTPUT]")
    trainer = parser.add_argument_group("options of halfword train")
    fields = TrainConfig.model_fields
    offered = [it for it in fields if it not in PLACES | FORMAT_OPTIONS | taken]
    for option in offered:
        is_switch = bool in (fields[option].annotation, *get_args(fields[option].annotation))
        kind = {"action": "store_const", "const": ""} if is_switch else {"metavar": "VALUE"}
        default = defaults.get(option)
        text = str(fields[option].description).replace("%", "%%")
        text += f" [here: {default}]" if default else ""
        trainer.add_argument(f"--{option}", default=default, help=text, **kind)
    arguments = parser.parse_args()
    arguments.presets = [it for it in PRESETS if it in {*arguments.presets, BASELINE}]
    arguments.runs = arguments.runs or Path("runs") / arguments.output.name
    given = {option: getattr(arguments, option) for option in offered}
    return arguments, {option: value for option, value in given.items() if value is not None}


def _read(run: Path) -> tuple[Losses, dict[str, Any]]:
    """Return a finished run's losses, and the part of its result that its files hold."""
    summary = json.loads((run / "summary.json").read_text())
    memory = json.loads((run / "memory.json").read_text())
    table = np.atleast_1d(np.genfromtxt(run / "metrics.csv", delimiter=",", names=True))
    losses = np.where(np.isnan(table["loss"]), np.nan, table["loss"])  # all NaNs are one
    stalled = table["stalled"] if "stalled" in table.dtype.names else np.array([])
    stalled = stalled[~np.isnan(stalled)]
    summary["device"].pop("flags")
    summary["corpus"]["name"] = Path(summary["corpus"]["name"]).name
    return losses, {
        **{key: summary[key] for key in ("versions", "device", "corpus", "num_parameters")},
        "bytes_per_parameter": memory["bytes_per_parameter"],
        "steps": len(losses),
        "tokens_per_step": int(table["tokens"][0]),
        **figures(losses, summary["settings"]["lr_warmup_steps"]),
        "eval_loss": float(summary["results"]["eval_loss"]),
        "stalled": float(stalled.mean()) if len(stalled) else None,
        "seconds": summary["results"]["seconds"],
        "digests": summary["digests"] | {"losses": hashlib.sha256(losses.tobytes()).hexdigest()},
    }


def _kept(options: Mapping[str, str]) -> dict[str, str]:
    """Return what decides the numbers of a run, and names no place."""
    return {
        key: Path(word).name if key in PATHS else word
        for key, word in options.items()
        if key not in UNREMARKABLE_SETTINGS
    }

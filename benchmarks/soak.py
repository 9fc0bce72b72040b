"""Break checkpoints on purpose: kill runs at random moments, damage folders at random places.

    python benchmarks/soak.py [--kills 50] [--damages 200]

Writes benchmarks/results/soak.json and fails where anything was lost or loaded wrong. `make test`
does the same with smaller counts.
"""

import argparse
import csv
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from halfword.checkpoint import CheckpointError, checkpoints, latest, read, read_manifest
from results import RESULTS, environment, write

STEPS_PER_KILL = 60
SETTINGS = (
    "--num_layers 2 --hidden_dim 32 --num_heads 2 --seq_length 32 --batch_size 4 --threads 1 "
    "--save_steps 3 --keep_checkpoints 3 --eval_steps 50 --log_interval 100000 --device cpu"
).split()


def main() -> int:
    """Run both and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--damages", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = folder / "text.txt"
        text.write_text(Path(__file__).read_text() * 20)
        killed = kill_and_resume(folder, text, arguments.kills, arguments.seed)
        source = folder / "killed" / "checkpoints"
        damaged = damage(source, folder / "damaged", arguments.damages, arguments.seed)
    write(RESULTS / "soak.json", {**environment(), "kills": killed, "damages": damaged})
    print(killed, damaged, sep="\n")
    return int(not killed["equal"] or damaged.get("loaded wrong", 0) > 0)


def kill_and_resume(folder: Path, text: Path, count: int, seed: int) -> dict[str, Any]:
    """Kill a run `count` times at random moments, resume it each time, compare with one left alone.

    Returns:
        How many kills hit the run, how many left a partial save behind, whether all bits are equal,
        and whether anything was written after a kill.
    """
    moments = random.Random(seed)
    options = [*SETTINGS, "--data", str(text), "--num_steps", str(STEPS_PER_KILL * count)]
    whole, run = folder / "whole", folder / "killed"
    _start(options, whole).wait()
    hits = partial = 0
    quiet = True
    while hits < count:
        process = _start([*options, "--resume", "auto"], run)
        _wait_for_growth(run / "metrics.csv", process)
        time.sleep(moments.uniform(0.0, 0.4))
        if process.poll() is not None:
            break
        process.send_signal(signal.SIGKILL)
        process.wait()
        hits += 1
        partial += bool(list(run.glob("checkpoints/.*.partial")))
        quiet = quiet and _is_quiet(run)
    _start([*options, "--resume", "auto"], run).wait()
    return {
        "kills": hits,
        "left a partial save": partial,
        "equal": _results(whole) == _results(run),
        "quiet after a kill": quiet,
    }


def damage(source: Path, scratch: Path, count: int, seed: int) -> dict[str, int]:
    """Damage copies of the newest of at least two checkpoints; count how each was taken.

    Returns:
        Counts of `refused`, `loaded right` (the damage changed no value) and `loaded wrong`.
    """
    choices = random.Random(seed)
    found, _ = latest(source)
    assert found is not None
    others = [path for _, path in checkpoints(source) if path != found]
    _, tensors, state = read(found)
    outcomes: Counter[str] = Counter()
    for _ in range(count):
        shutil.rmtree(scratch, ignore_errors=True)
        shutil.copytree(found, scratch)
        _damage_once(scratch, others[0], choices)
        try:
            _, loaded, loaded_state = read(scratch)
        except CheckpointError:
            outcomes["refused"] += 1
            continue
        same = loaded.keys() == tensors.keys() and loaded_state == state
        same = same and all(torch.equal(loaded[name], tensors[name]) for name in tensors)
        outcomes["loaded right" if same else "loaded wrong"] += 1
    return dict(outcomes)


def _damage_once(folder: Path, other: Path, choices: random.Random) -> None:
    files = sorted(folder.iterdir())
    file = choices.choice(files)
    kind = choices.choice(["cut", "flip", "delete", "swap", "exchange", "edit", "append", "add"])
    content = bytearray(file.read_bytes())
    if kind == "cut":
        file.write_bytes(content[: choices.randrange(len(content))])
    elif kind == "flip":
        content[choices.randrange(len(content))] ^= 1 << choices.randrange(8)
        file.write_bytes(content)
    elif kind == "delete":
        file.unlink()
    elif kind == "swap":  # with the same file of another step
        shutil.copy(other / file.name, file)
    elif kind == "exchange":  # with another file of the same step
        second = choices.choice([path for path in files if path != file])
        file.write_bytes(second.read_bytes())
        second.write_bytes(content)
    elif kind == "edit":  # one digit of a JSON file
        file = choices.choice([path for path in files if path.suffix == ".json"])
        text = file.read_text()
        at = choices.choice([i for i, character in enumerate(text) if character.isdigit()])
        file.write_text(text[:at] + str(choices.randrange(10)) + text[at + 1 :])
    elif kind == "append":
        file.write_bytes(content + b" ")
    else:
        (folder / "model-00001-of-00001.safetensors").write_bytes(content)


def _start(options: list[str], run: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "halfword", "train", "--run", str(run), *options]
    return subprocess.Popen(
        command, stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )


def _wait_for_growth(file: Path, process: subprocess.Popen[bytes]) -> None:
    """Wait until a process has begun to train, which its first row shows."""
    before = file.stat().st_mtime_ns if file.exists() else 0
    while process.poll() is None:
        if file.exists() and file.stat().st_mtime_ns != before:
            return
        time.sleep(0.01)


def _is_quiet(run: Path) -> bool:
    def look() -> list[tuple[str, int]]:
        return sorted((str(path), path.stat().st_mtime_ns) for path in run.rglob("*"))

    before = look()
    time.sleep(0.2)
    return before == look()


def _results(run: Path) -> tuple[object, ...]:
    """Return what must be equal: each row but its times, all tensors of the last checkpoint."""
    with (run / "metrics.csv").open(newline="") as lines:
        rows = [
            tuple(row[name] for name in ("step", "loss", "lr", "grad_norm", "tokens"))
            for row in csv.DictReader(lines)
        ]
    step, newest = next(iter(checkpoints(run / "checkpoints")))
    return step, rows, read_manifest(newest).fingerprint


if __name__ == "__main__":
    sys.exit(main())

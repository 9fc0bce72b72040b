"""The demonstration: one small model, four precisions, and what they cost."""

import subprocess
import sys
from pathlib import Path

from rich.console import Console

from halfword.report import compare
from halfword.train.config import Precision

PRECISIONS: tuple[Precision, ...] = ("fp32-master", "exact", "exact-bf16", "bf16")

# Less than a minute a run on two cores.
SETTINGS = (
    "--num_layers 4 --hidden_dim 128 --num_heads 4 --seq_length 128 --batch_size 8 "
    "--num_steps 250 --learning_rate 2e-3 --log_interval 50 --seed 0"
).split()


def demo(folder: Path, console: Console) -> int:
    """Train each precision into a subfolder, compare them, and return the exit code.

    Each run is the command that a user would type, in a process of its own: so the peak memory that
    it records is its own too.
    """
    runs = [folder / precision for precision in PRECISIONS]
    for precision, run in zip(PRECISIONS, runs, strict=True):
        options = ["--precision", precision, "--run", str(run), "--overwrite", *SETTINGS]
        console.rule(f"halfword train --precision {precision}")
        code = _train(options)
        if code:
            return code
    comparison = compare(runs, folder / "comparison", console)
    return 1 if comparison.has_nonfinite else 0


def _train(options: list[str]) -> int:
    with subprocess.Popen([sys.executable, "-m", "halfword", "train", *options]) as process:
        try:
            return process.wait()
        except KeyboardInterrupt:  # the run got it too: let it finish its files
            return process.wait()

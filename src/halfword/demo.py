"""The demonstration: one small model, every precision, and what each costs."""

import subprocess
import sys
from pathlib import Path

from rich.console import Console

from halfword.report import compare
from halfword.train.config import PRESETS

# Less than half a minute a run on two cores. All widths are whole blocks of 8-bit moments. No
# clipping, for leanest cannot know the global norm.
SETTINGS = (
    "--num_layers 4 --hidden_dim 128 --ffn_dim 384 --num_heads 4 --seq_length 128 --batch_size 8 "
    "--num_steps 200 --learning_rate 2e-3 --max_grad_norm 0 --log_interval 50 --seed 0"
).split()


def demo(folder: Path, console: Console) -> int:
    """Train each precision into a subfolder, compare them, and return the exit code.

    Each run is the command that a user would type, in a process of its own: so the peak memory that
    it records is its own too.
    """
    runs = [folder / precision for precision in PRESETS]
    for precision, run in zip(PRESETS, runs, strict=True):
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

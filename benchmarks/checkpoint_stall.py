"""Time how long a save holds training up, beside one plain copy of the same bytes.

    python benchmarks/checkpoint_stall.py [--parameters 20000000] [--rounds 7]

Writes benchmarks/results/checkpoint_stall.json and fails where the stall is over 1.3 copies.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor

from halfword import AdamW
from halfword.checkpoint import Writer, flatten
from results import RESULTS, environment, write

BAR = 1.3
LAYERS = 20


def main() -> int:
    """Run the benchmark and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=int, default=20_000_000)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    width = arguments.parameters // LAYERS
    model = torch.nn.ParameterList(torch.randn(width).bfloat16() for _ in range(LAYERS))
    tensors, settings = flatten(model, AdamW(model.named_parameters()))
    stalls, copies = measure(tensors, settings, arguments.rounds)
    ratio = statistics.median(stalls) / statistics.median(copies)
    result = {
        "benchmark": "checkpoint_stall",
        **environment(),
        "bytes": sum(tensor.nbytes for tensor in tensors.values()),
        "rounds": arguments.rounds,
        "stall_s": statistics.median(stalls),
        "copy_s": statistics.median(copies),
        "ratio": ratio,
        "bar": BAR,
    }
    write(RESULTS / "checkpoint_stall.json", result)
    print(f"stall / copy: {ratio:.2f} (bar {BAR})")
    return int(ratio > BAR)


def measure(
    tensors: dict[str, Tensor], settings: dict[str, object], rounds: int
) -> tuple[list[float], list[float]]:
    """Let saves and copies take turns; the first of each makes its buffers and is not counted."""
    stalls, copies = [], []
    buffers = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    with tempfile.TemporaryDirectory() as folder:
        writer = Writer(Path(folder), keep=1)
        for number in range(rounds + 1):
            writer.wait()
            started = time.perf_counter()
            for name, tensor in tensors.items():
                buffers[name].copy_(tensor)
            copied = time.perf_counter()
            writer.save(number, tensors, settings)
            saved = time.perf_counter()
            if number:
                copies.append(copied - started)
                stalls.append(saved - copied)
        writer.wait()
    return stalls, copies


if __name__ == "__main__":
    sys.exit(main())

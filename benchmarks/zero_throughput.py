"""Time ZeRO stage 3 on two ranks beside one process with the same cores and the same global batch.

    python benchmarks/zero_throughput.py [--hidden_dim 256] [--num_layers 4] [--rounds 3] ...

A third run exchanges communication for copies on each rank, which trains nothing: what a step costs
beyond it is the share of communication. Writes benchmarks/results/zero_throughput.json.
"""

import argparse
import statistics
import sys
import tempfile
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from halfword.parallel.sharded import Sharded
from halfword.train.config import TrainConfig
from halfword.train.loop import train_step
from halfword.train.training import build
from halfword.train.world import World
from processes import launch, write_text
from results import RESULTS, environment, write

WARMUP = 2
SIZE = 2


def main() -> int:
    """Run the benchmark and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden_dim", type=int, default=256)
    parser.add_argument("--num_layers", type=int, default=4)
    parser.add_argument("--batch_size", type=int, default=8, help="of all ranks together")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    settings = {
        **{"hidden_dim": arguments.hidden_dim, "num_layers": arguments.num_layers},
        **{"seq_length": 128, "device": "cpu", "stall_steps": 0, "lr_warmup_steps": 0},
        **{"num_steps": WARMUP + arguments.steps, "zero_stage": 3},
    }
    times: dict[str, list[float]] = {"single": [], "stage 3": [], "without communication": []}
    with tempfile.TemporaryDirectory() as folder:
        data = {"data": write_text(folder)}
        whole = settings | data | {"batch_size": arguments.batch_size, "threads": SIZE}
        part = settings | data | {"batch_size": arguments.batch_size // SIZE, "threads": 1}
        for _ in range(arguments.rounds):  # taking turns, for a machine is not always equally fast
            times["single"] += launch(1, seconds, whole, True)[0]
            times["stage 3"] += launch(SIZE, seconds, part, True)[0]
            times["without communication"] += launch(SIZE, seconds, part, False)[0]
    medians = {name: statistics.median(found) for name, found in times.items()}
    tokens = arguments.batch_size * settings["seq_length"]
    result = {
        **environment(),
        "settings": settings | {"batch_size": arguments.batch_size},
        "step_s": medians,
        "tokens_per_s": {name: tokens / medians[name] for name in ("single", "stage 3")},
        "ratio": medians["single"] / medians["stage 3"],
        "communication": 1 - medians["without communication"] / medians["stage 3"],
    }
    write(RESULTS / "zero_throughput.json", result)
    print(f"stage 3 / single: {result['ratio']:.2f}; communication {result['communication']:.0%}")
    return 0


def seconds(rank: int, size: int, settings: dict[str, Any], communicate: bool) -> list[float]:
    """Return the time of each step after the first ones."""
    world = World(rank, size)
    if size > 1:
        world.mesh = init_device_mesh("cpu", (size,))
    training = build(TrainConfig(**settings), world)
    if not communicate and isinstance(training.model, Sharded):
        for unit in training.model.units:
            unit.set_custom_all_gather(Copies())
            unit.set_custom_reduce_scatter(Part())
    rows = [train_step(training, step) for step in range(training.config.num_steps)]
    return [row.step_s for row in rows[WARMUP:]]


class Allocation:
    """What FSDP2 asks its communication for: plain memory."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory of a size."""
        return torch.empty(*size, dtype=dtype, device=device)


class Copies(Allocation):
    """In place of an all-gather: the own part in every place."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **_: Any) -> None:
        """Fill the output."""
        own = input_tensor.clone()  # FSDP2 gives a part of the output
        output_tensor.view(-1, own.numel()).copy_(own.view(1, -1))


class Part(Allocation):
    """In place of a reduce-scatter: the own gradients of the own part."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **about: Any) -> None:
        """Fill the output."""
        group = about["group"]
        output_tensor.copy_(input_tensor.chunk(group.size())[group.rank()])


if __name__ == "__main__":
    sys.exit(main())

"""Measure what each rank holds, by ZeRO stage and preset, beside what arithmetic says.

    python benchmarks/zero_memory.py [--sizes 1 2 4] [--hidden_dim 128] [--num_layers 2]

Writes benchmarks/results/zero_memory.json, and fails where a byte that stays between steps differs.
"""

import argparse
import itertools
import sys
import tempfile
from typing import Any

from torch.distributed.device_mesh import init_device_mesh

from halfword.train.config import PRESETS, TrainConfig
from halfword.train.footprint import planned
from halfword.train.loop import train_step
from halfword.train.training import build
from halfword.train.world import World
from processes import launch, write_text
from results import RESULTS, environment, write

STAGES = (0, 1, 2, 3)


def main() -> int:
    """Run the benchmark and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--hidden_dim", type=int, default=128)
    parser.add_argument("--num_layers", type=int, default=2)
    arguments = parser.parse_args()
    settings = {
        **{"hidden_dim": arguments.hidden_dim, "num_layers": arguments.num_layers},
        **{"seq_length": 32, "batch_size": 1, "num_steps": 2, "threads": 1, "device": "cpu"},
        **{"lr_warmup_steps": 0, "stall_steps": 0},
    }
    with tempfile.TemporaryDirectory() as folder:
        data = {"data": write_text(folder)}
        measured = [launch(size, measure, settings | data)[0] for size in arguments.sizes]
    rows = [row for rows in measured for row in rows]
    wrong = [row for row in rows if row["between_steps"] != row["arithmetic"]]
    write(RESULTS / "zero_memory.json", {**environment(), "settings": settings, "rows": rows})
    for row in wrong:
        print(f"differs: {row}")
    print(f"{len(rows) - len(wrong)} of {len(rows)} equal to the byte")
    return int(bool(wrong))


def measure(rank: int, size: int, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Train two steps in every stage and preset; return what this rank held."""
    world = World(rank, size)
    if size > 1:
        world.mesh = init_device_mesh("cpu", (size,))
    rows = []
    for stage, precision in itertools.product(STAGES, PRESETS):
        config = TrainConfig(**settings, zero_stage=stage, precision=precision)
        training = build(config, world)
        for step in range(config.num_steps):
            train_step(training, step)
        held = training.memory
        rows.append(
            {
                **{"world_size": size, "zero_stage": stage, "precision": precision},
                "num_parameters": held["between_steps"].num_parameters,
                "between_steps": held["between_steps"].total_bytes,
                "at_step_entry": held["at_step_entry"].total_bytes,
                "arithmetic": planned(training)["between_steps"].total_bytes,
            }
        )
    return rows


if __name__ == "__main__":
    sys.exit(main())

"""Hold the plan against real runs, and plan the model of DeepSpeed's BF16 example.

    python benchmarks/plan.py [--sizes 1 2 4] [--hidden_dim 256] [--num_layers 4] [--no-example]

Every preset trains some steps in every ZeRO stage and world; what the first rank holds at the entry
of a step and between steps must be the plan's to the byte, and the peak that torch's profiler saw
within 5 % of the traced one. It is the least of several steps: a plan has communication that is
done at once, and here ranks share cores, so that now and then a buffer waits for another rank.
Writes benchmarks/results/plan.json; fails where that is missed.
"""

import argparse
import itertools
import math
import sys
import tempfile
import time
from typing import Any

from torch.distributed.device_mesh import init_device_mesh

from halfword.planning.answer import BETWEEN, ENTRY, PEAK, Row, answer
from halfword.planning.request import Request
from halfword.planning.step import shapes, trace_step
from halfword.train import footprint
from halfword.train.config import PRESETS, Precision, TrainConfig
from halfword.train.loop import train_step
from halfword.train.training import build
from halfword.train.world import World
from processes import launch, write_text
from results import RESULTS, environment, write

TOLERANCE = 0.05
VOCAB_SIZE = 256
# The example: hidden size, layers, heads and tokens are its own, with GPT-2's 50,257 tokens. Its
# feed-forward network has two matrices, this one three: the width that comes nearest to its
# 6,858,007,633 parameters.
EXAMPLE = {
    **{"hidden_dim": 4096, "num_layers": 32, "num_heads": 32, "ffn_dim": 10932},
    **{"vocab_size": 50257, "batch_size": 1, "seq_length": 512},
    **{"activation_checkpointing": True, "zero_stage": 3, "device": "cuda"},
}
RANKS = 4


def main() -> int:
    """Run the benchmark and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--hidden_dim", type=int, default=256)
    parser.add_argument("--num_layers", type=int, default=4)
    parser.add_argument("--example", action=argparse.BooleanOptionalAction, default=True)
    arguments = parser.parse_args()
    settings = {
        **{"hidden_dim": arguments.hidden_dim, "num_layers": arguments.num_layers},
        **{"seq_length": 128, "batch_size": 2, "num_steps": 6, "threads": 1, "device": "cpu"},
        **{"lr_warmup_steps": 0, "stall_steps": 0},
    }
    runs = [
        row
        for size in arguments.sizes
        for row in compare(settings, size, (0,) if size == 1 else (0, 1, 2, 3), tuple(PRESETS))
    ]
    result = {**environment(), "settings": settings, "runs": runs}
    if arguments.example:
        result["example"] = example()
    write(RESULTS / "plan.json", result)
    wrong = [run for run in runs if not (run["equal"] and abs(run["peak_error"]) <= TOLERANCE)]
    for run in wrong:
        print(f"missed: {run}")
    worst = max(abs(run["peak_error"]) for run in runs)
    print(f"{len(runs) - len(wrong)} of {len(runs)} as planned; worst peak {worst:.1%} off")
    return int(bool(wrong))


def compare(
    settings: dict[str, Any], size: int, stages: tuple[int, ...], presets: tuple[Precision, ...]
) -> list[dict[str, Any]]:
    """Return a row for each stage and preset: planned, measured, and whether they agree."""
    with tempfile.TemporaryDirectory() as folder:
        data = {"data": write_text(folder)}
        measured = launch(size, measure, settings | data, stages, presets)[0]
    rows = []
    for stage in stages:
        for row in planned(TrainConfig(**settings, zero_stage=stage), VOCAB_SIZE, size):
            if row.name not in presets:
                continue
            found = measured[stage, row.name]
            peak = sum(found[PEAK].values())
            rows.append(
                {
                    **{"world_size": size, "zero_stage": stage, "precision": row.name},
                    "equal": all(
                        found[moment] == row.moments[moment]["total"] for moment in (ENTRY, BETWEEN)
                    ),
                    **{"planned": row.moments, "measured": found},
                    "peak_error": row.moments[PEAK]["total"] / peak - 1,
                }
            )
    return rows


def planned(config: TrainConfig, vocab_size: int, size: int) -> list[Row]:
    """Return the plan's rows, one a preset."""
    request = Request(
        config,
        size,
        footprint.sharding(config, size),
        shapes(config, vocab_size),
        vocab_size,
        None,
    )
    return answer(request, lambda released: trace_step(config, vocab_size, size, released=released))


def measure(
    rank: int,
    size: int,
    settings: dict[str, Any],
    stages: tuple[int, ...],
    presets: tuple[Precision, ...],
) -> dict[tuple[int, str], Any]:
    """Train in every stage and preset; return what this rank held."""
    world = World(rank, size)
    if size > 1:
        world.mesh = init_device_mesh("cpu", (size,))
    found = {}
    for stage, precision in itertools.product(stages, presets):
        training = build(TrainConfig(**settings, zero_stage=stage, precision=precision), world)
        held, peaks = training.memory, []
        for step in range(training.config.num_steps):
            with footprint.peak_watched(training, min(step, footprint.PEAK_STEP)):
                train_step(training, step)
            if PEAK in held:
                components = held[PEAK].components.items()
                peaks.append({name: sum(planes.values()) for name, planes in components})
        totals = [sum(peak.values()) for peak in peaks]
        found[stage, precision] = {
            ENTRY: held[ENTRY].total_bytes,
            BETWEEN: held[BETWEEN].total_bytes,
            PEAK: peaks[totals.index(min(totals))],
            "peaks": totals,
        }
    return found


def example() -> dict[str, Any]:
    """Plan the model of DeepSpeed's example on its four ranks."""
    config = TrainConfig(**EXAMPLE)
    started = time.perf_counter()
    rows = planned(config, EXAMPLE["vocab_size"], RANKS)
    return {
        "settings": EXAMPLE,
        "world_size": RANKS,
        "seconds": time.perf_counter() - started,
        "num_parameters": sum(map(math.prod, shapes(config, EXAMPLE["vocab_size"]))),
        "presets": {row.name: row.moments for row in rows},
    }


if __name__ == "__main__":
    sys.exit(main())

"""Time `halfword train` beside plain torch loops of the same architecture, in one run.

The peer is what one would write by hand: BF16 weights, FP32 masters in
`torch.optim.AdamW(fused=True)`, gradients cast up, `clip_grad_norm_`, masters cast down. A second
peer does everything in FP32. All arms take turns, so that a machine that slows down slows all; each
figure is a median over the rounds.

    python benchmarks/train_loop.py [--rounds 9] [--hidden_dim 256] ...

Writes benchmarks/results/train_loop.json and fails where halfword is slower than the first peer.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from halfword.train.config import TrainConfig
from halfword.train.loop import build, train_step
from halfword.train.model import build_model, loss_sum
from results import RESULTS, environment, write

BAR = 1.0
Step = Callable[[int], None]


def main() -> int:
    """Run the benchmark and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9, help="timed steps of each arm")
    parser.add_argument("--hidden_dim", type=int, default=256)
    parser.add_argument("--num_layers", type=int, default=4)
    parser.add_argument("--output", type=Path, default=RESULTS / "train_loop.json")
    arguments = parser.parse_args()
    config = TrainConfig(
        hidden_dim=arguments.hidden_dim,
        num_layers=arguments.num_layers,
        num_steps=1000,
        precision="exact",
        device="cpu",
    )
    seconds = measure(arms(config), arguments.rounds)
    tokens = config.batch_size * config.seq_length
    rates = {name: tokens / statistics.median(times) for name, times in seconds.items()}
    ratio = rates["halfword exact"] / rates["torch, FP32 masters"]
    result = {
        "benchmark": "train_loop",
        **environment(),
        "settings": config.to_toml(),
        "rounds": arguments.rounds,
        "tokens_per_s": rates,
        "ratio": ratio,
        "bar": BAR,
    }
    write(arguments.output, result)
    for name, rate in rates.items():
        print(f"{name:22} {rate:10.0f} tokens/s")
    print(f"halfword / torch with FP32 masters: {ratio:.3f} (bar {BAR})")
    return int(ratio < BAR)


def arms(config: TrainConfig) -> dict[str, Step]:
    """Return one step of each loop, by name."""
    training = build(config)

    def halfword_step(step: int) -> None:
        training.rows.append(train_step(training, step))

    def batch(step: int) -> tuple[Tensor, Tensor]:
        return training.sequences.micro_batch(step, config.batch_size)

    vocab_size = training.config.vocab_size or 0
    return {
        "halfword exact": halfword_step,
        "torch, FP32 masters": _masters_loop(config, vocab_size, batch),
        "torch, all FP32": _fp32_loop(config, vocab_size, batch),
    }


def measure(steps: dict[str, Step], rounds: int) -> dict[str, list[float]]:
    """Let the arms take turns, two steps each to warm up; return seconds by arm."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 2):
        for name, step in steps.items():
            started = time.perf_counter()
            step(number)
            if number >= 2:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def _masters_loop(
    config: TrainConfig, vocab_size: int, batch: Callable[[int], tuple[Tensor, Tensor]]
) -> Step:
    model = build_model(config, vocab_size, torch.device("cpu"))
    parameters = list(model.parameters())
    masters = [parameter.detach().float() for parameter in parameters]
    optimizer = torch.optim.AdamW(masters, lr=config.learning_rate, weight_decay=0.1, fused=True)

    def step(number: int) -> None:
        inputs, targets = batch(number)
        (loss_sum(model(inputs), targets) / targets.numel()).backward()
        for master, parameter in zip(masters, parameters, strict=True):
            master.grad = parameter.grad.float()
            parameter.grad = None
        torch.nn.utils.clip_grad_norm_(masters, config.max_grad_norm)
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, parameters, strict=True):
                parameter.copy_(master)

    return step


def _fp32_loop(
    config: TrainConfig, vocab_size: int, batch: Callable[[int], tuple[Tensor, Tensor]]
) -> Step:
    model = build_model(config, vocab_size, torch.device("cpu")).float()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.learning_rate, weight_decay=0.1, fused=True
    )

    def step(number: int) -> None:
        inputs, targets = batch(number)
        (loss_sum(model(inputs), targets) / targets.numel()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()

    return step


if __name__ == "__main__":
    sys.exit(main())

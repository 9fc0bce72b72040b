"""DeepSpeed's example of BF16 masters and states, run again beside halfword, fairly.

Its own evidence has targets that are not shifted, no causal mask, padding in the loss, and
autocast in one arm only. Here all arms train one model (halfword's, causal, targets shifted, packed
text) from the same weights on the same batches, without autocast: the weights are BF16 in every
arm, and so is the arithmetic of the model. What differs is who keeps masters, moments and
gradients, and how.

DeepSpeed is not among halfword's requirements; install it for this benchmark alone:

    pip install deepspeed==0.19.8 ninja
    python benchmarks/deepspeed_example.py [--num_steps 200]

It runs ZeRO stage 3 on one rank over gloo, as its configs/baseline.json and bf16_full.json ask
for, with torch's AdamW (its option `torch_adam`; its own would be compiled first). The arms take
turns, step by step, so that a machine that slows down slows all. Memory is counted by torch's
allocator, from before the arm is built: *held* between steps, and the *peak* of a step. Writes
benchmarks/results/deepspeed_example/.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from halfword.report import compare
from halfword.train.config import Precision, TrainConfig
from halfword.train.loop import train_step
from halfword.train.metrics import Row
from halfword.train.model import build_model, loss_sum
from halfword.train.training import Training, build
from results import RESULTS, environment, write

OUTPUT = RESULTS / "deepspeed_example"
PRESETS: tuple[Precision, ...] = ("fp32-master", "exact", "bf16", "lean")
LOW = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
DEEPSPEED: dict[str, dict[str, bool]] = {
    "DeepSpeed, FP32 masters": {"enabled": True},
    "DeepSpeed, BF16 masters and states": {"enabled": True, **LOW},
}
PROFILED_STEPS = 3  # the first makes what is made once
LAST_STEP = "last profiled step"
SHAPE: dict[str, Any] = {
    **{"num_layers": 4, "hidden_dim": 128, "ffn_dim": 384, "num_heads": 4, "seq_length": 128},
    **{"batch_size": 4, "learning_rate": 1e-3, "lr_schedule": "constant", "lr_warmup_steps": 0},
    **{"beta2": 0.999, "weight_decay": 0.01, "max_grad_norm": 0.0, "stall_steps": 0},
    **{"device": "cpu", "threads": 1},
}  # the optimizer of the example's files, but for a learning rate that suits the smaller model


@dataclass
class Arm:
    """One way to train: what it holds, and what each step gave."""

    step: Callable[[int], float]  # of a step's number, its loss
    held_bytes: int = 0
    peak_bytes: int = 0
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


def main() -> int:
    """Run all arms, write the results, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num_steps", type=int, default=200)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    arguments = parser.parse_args()
    config = TrainConfig(num_steps=arguments.num_steps, **SHAPE)
    arms = {f"halfword {preset}": _profiled(_halfword, config, preset) for preset in PRESETS}
    data = build(config)
    arms |= {name: _profiled(_deepspeed, data, bf16) for name, bf16 in DEEPSPEED.items()}
    for number in range(PROFILED_STEPS, arguments.num_steps):
        for arm in arms.values():
            _take_step(arm, number)
    num_parameters = sum(parameter.numel() for parameter in data.model.parameters())
    result = {
        "benchmark": "deepspeed_example",
        **environment(),
        "deepspeed": version("deepspeed"),
        "settings": data.config.to_toml(),
        "num_parameters": num_parameters,
        "timed_from_step": PROFILED_STEPS,
        "arms": {name: _summary(arm, num_parameters) for name, arm in arms.items()},
    }
    write(arguments.output / "result.json", result)
    for name, arm in arms.items():
        _write_losses(arguments.output / f"{_slug(name)}.csv", arm)
    curves = [arguments.output / f"{_slug(name)}.csv" for name in arms]
    compare(curves, arguments.output / "loss.png", Console())
    for name, figures in result["arms"].items():
        print(f"{name:36}", *(f"{key} {value:.4f}" for key, value in figures.items()))
    return 0


def _slug(name: str) -> str:
    return name.replace(",", "").replace(" ", "-")


def _profiled(make: Callable[..., Callable[[int], float]], *arguments: Any) -> Arm:
    """Make an arm and take its first steps, counting what the allocator has handed out."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        arm = Arm(make(*arguments))
        for number in range(PROFILED_STEPS - 1):
            _take_step(arm, number)
        with record_function(LAST_STEP):
            _take_step(arm, PROFILED_STEPS - 1)
    events = sorted(recorded.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    in_last_step = False
    for event in events:
        in_last_step |= event.name() == LAST_STEP
        if event.name() == "[memory]":
            arm.held_bytes += event.nbytes()  # negative for what is freed
            if in_last_step:
                arm.peak_bytes = max(arm.peak_bytes, arm.held_bytes)
    return arm


def _take_step(arm: Arm, number: int) -> None:
    started = time.perf_counter()
    arm.losses.append(arm.step(number))
    arm.seconds.append(time.perf_counter() - started)


def _halfword(config: TrainConfig, preset: Precision) -> Callable[[int], float]:
    training = build(config.model_copy(update={"precision": preset}))

    def step(number: int) -> float:
        row: Row = train_step(training, number)
        return row.loss

    return step


def _deepspeed(data: Training, bf16: dict[str, bool]) -> Callable[[int], float]:
    """Return a step of DeepSpeed's engine on halfword's model and batches."""
    import deepspeed

    _join_world_of_one()
    config = data.config
    model = build_model(config, config.vocab_size or 0, data.device)
    tables = {name: buffer.clone() for name, buffer in model.named_buffers()}
    named = list(model.named_parameters())
    groups = [  # as halfword's: norms do not decay
        {"params": [p for _, p in named if p.dim() > 1]},
        {"params": [p for _, p in named if p.dim() == 1], "weight_decay": 0.0},
    ]
    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=groups, config=_deepspeed_config(config, bf16)
    )
    for name, buffer in engine.module.named_buffers():
        buffer.data = tables[name]  # DeepSpeed rounds the rotary tables to BF16 too
    engine.train()

    def step(number: int) -> float:
        inputs, targets = data.sequences.micro_batch(number, config.batch_size)
        loss: Tensor = loss_sum(engine(inputs), targets) / targets.numel()
        engine.backward(loss)
        engine.step()
        return loss.item()

    return step


def _deepspeed_config(config: TrainConfig, bf16: dict[str, bool]) -> dict[str, Any]:
    params = {
        **{"lr": config.learning_rate, "betas": [config.beta1, config.beta2]},
        **{"eps": config.eps, "weight_decay": config.weight_decay, "torch_adam": True},
    }
    return {
        "train_micro_batch_size_per_gpu": config.batch_size,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,  # left out, it would be 1 (runtime/constants.py)
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": params},
        "bf16": bf16,
        "zero_optimization": {
            **{"stage": 3, "overlap_comm": True, "contiguous_gradients": True},
            # The example's 5e7 elements would be 54 times this model.
            **{"reduce_bucket_size": 10**6, "stage3_param_persistence_threshold": 0},
        },
    }


def _join_world_of_one() -> None:
    import deepspeed

    if not torch.distributed.is_initialized():
        numbers = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        os.environ.update(numbers, MASTER_PORT="29571")
        deepspeed.init_distributed(dist_backend="gloo")


def _summary(arm: Arm, num_parameters: int) -> dict[str, float]:
    return {
        "final_loss": arm.losses[-1],
        "mean_loss": statistics.fmean(arm.losses),
        "loss_std": statistics.pstdev(arm.losses),
        "held_bytes_per_parameter": arm.held_bytes / num_parameters,
        "peak_bytes_per_parameter": arm.peak_bytes / num_parameters,
        "step_s_median": statistics.median(arm.seconds[PROFILED_STEPS:]),
    }


def _write_losses(path: Path, arm: Arm) -> None:
    lines = [f"{step},{loss!r}\n" for step, loss in enumerate(arm.losses)]
    path.write_text("".join(["step,loss\n", *lines]))


if __name__ == "__main__":
    sys.exit(main())

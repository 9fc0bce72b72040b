"""What a run holds of memory, beside what it should hold by arithmetic."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace

from halfword.memory import Memory, Peak, Sharding, plan
from halfword.train.config import TrainConfig
from halfword.train.training import Training

PEAK_STEP = 2
"""The step whose peak is measured: before it, engines and backends make what they make once."""


def sharding(config: TrainConfig, world_size: int, rank: int = 0) -> Sharding:
    """Return which part of the model a rank of a world holds."""
    size = config.shard_size or world_size
    return Sharding(config.zero_stage, world_size, size, rank % size)


def rule_name(config: TrainConfig) -> str:
    """Return the rule that the settings mean, as ``halfword.memory.plan`` takes it."""
    if config.optimizer == "sgd" and config.beta1 > 0:
        return "sgd_momentum"
    return config.optimizer


def planned(training: Training) -> dict[str, Memory]:
    """Return what arithmetic says that this rank holds, by moment."""
    config, world = training.config, training.world
    return plan(
        [tuple(parameter.shape) for parameter in training.model.parameters()],
        *config.formats,
        rule_name(config),
        sharding(config, world.size, world.rank),
        released=config.release_gradients,
        accumulated=config.gradient_accumulation_steps > 1,
    )


def held(training: Training) -> Memory:
    """Return what this rank holds now, counted by storage, without activations."""
    memory = training.optimizer.memory()
    idle = training.model.idle_bytes()
    if not idle:
        return memory
    return replace(memory, components=memory.components | {"communication": {"buckets": idle}})


@contextlib.contextmanager
def peak_watched(training: Training, step: int) -> Iterator[None]:
    """Measure the peak of one early step that the timing leaves out, if this is the one."""
    if step != PEAK_STEP or step >= training.config.warmup_steps:
        yield
        return
    optimizer, buffers = training.optimizer, list(training.model.buffers())
    sums = {}
    if training.config.gradient_accumulation_steps > 1:
        sums = optimizer.accumulate_in_fp32().buffers
    before = held(training)
    with Peak(training.device) as peak:
        arrived = optimizer.register_step_pre_hook(
            lambda *_: peak.note_gradients(
                [*sums.values(), *(p.grad for p in optimizer.parameters() if p.grad is not None)]
            )
        )
        try:
            yield
        finally:
            arrived.remove()
    beyond = {name: {name: size} for name, size in peak.components.items()}
    tables = {"buffers": {"buffers": sum(buffer.nbytes for buffer in buffers)}}
    training.memory["peak"] = replace(before, components=before.components | tables | beyond)

"""The trainer's own step, traced on fake tensors, for memory that shapes alone do not tell."""

import contextlib

import torch
from torch import Tensor

import halfword
from halfword.memory.trace import Step, Traced, fake_ranks, trace
from halfword.parallel import Parallel
from halfword.train.config import TrainConfig
from halfword.train.loop import backward
from halfword.train.matmul import as_in_hardware
from halfword.train.model import Llama
from halfword.train.training import spread
from halfword.train.world import World, mesh_sizes

CPU = torch.device("cpu")

UNSEEN = (
    "allocator rounding and fragmentation",
    "workspaces of matrix products, attention and communication libraries",
    "the device's own context and code",
    "a tile of the optimizer, at most 1 MiB",
)
"""What no trace sees; it is named, never guessed."""


def shapes(config: TrainConfig, vocab_size: int) -> list[tuple[int, ...]]:
    """Return the shapes of a model's parameters, each once, without making it."""
    with torch.device("meta"):
        model = Llama(config, vocab_size)
    return [tuple(parameter.shape) for parameter in model.parameters()]


def trace_step(config: TrainConfig, vocab_size: int, world_size: int, *, released: bool) -> Traced:
    """Run a step's last micro-batch, forward and backward, as the first rank of a world would.

    Sums of gradients over the earlier ones are there already.

    Args:
        config: its device says how matrices are multiplied: ``cpu`` as this one does, others in
            BF16.
        vocab_size: rows of the embedding.
        world_size: ranks, all but one of them fake.
        released: whether gradients are freed as they arrive, whatever the settings say.
    """
    hardware = contextlib.nullcontext() if config.device == "cpu" else as_in_hardware()
    world = World(0, world_size)
    with hardware, fake_ranks(world_size, mesh_sizes(world_size, config.shard_size)) as world.mesh:
        model = Llama(config, vocab_size)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
        return trace(lambda: _step(config, spread(config, model, world), released))


def _step(config: TrainConfig, model: Parallel, released: bool) -> Step:
    # It keeps nothing: what other optimizers hold is known by arithmetic.
    optimizer = halfword.SGD(list(model.named_parameters()), master_weights="bf16")
    model.attach(optimizer)
    sums: dict[Tensor, Tensor] = {}
    if config.gradient_accumulation_steps > 1:
        sums = model.accumulate_in_fp32(optimizer).buffers
        sums.update((p, torch.zeros_like(p, dtype=torch.float32)) for p in optimizer.parameters())

    def drop(parameter: Tensor, release: halfword.Release, is_fresh: bool) -> None:
        parameter.grad = None
        sums.pop(parameter, None)

    release = halfword.Release(optimizer.parameters(), drop, None) if released else None
    shape = config.gradient_accumulation_steps, config.batch_size, config.seq_length
    inputs, targets = torch.zeros(2, *shape, dtype=torch.int64).unbind()

    def run() -> None:
        backward(model, release, CPU, [(inputs[-1], targets[-1])], targets.numel())
        model.share_weights()

    return Step(model.module, [inputs, *sums.values()], run)

"""What a rank will hold, from shapes and formats alone, to the byte.

The formats' planes say how many bytes an element takes; nothing else here does. Parts are cut as
``torch.chunk``, DTensors and FSDP2 cut them: rows of the first dimension, all parts but the last
ones equally many.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from halfword.formats import MASTER_WEIGHTS, Plane
from halfword.formats.block8 import BLOCK
from halfword.memory.measured import Memory
from halfword.rules import RULES
from halfword.settings import dtype_name, slot_formats
from halfword.shards import chunk
from halfword.stored import state_keys, weight_keys

Shape = tuple[int, ...]
WEIGHT = torch.bfloat16


@dataclass(frozen=True)
class Sharding:
    """Which part of a model one rank holds; by default all of it, alone.

    Attributes:
        zero_stage: 0 to 3; of no meaning for one rank.
        world_size: ranks over all.
        size: ranks that share one copy of what is sharded.
        rank: of this rank among those; the first ones hold the most.
    """

    zero_stage: int = 0
    world_size: int = 1
    size: int = 1
    rank: int = 0

    @property
    def has_buckets(self) -> bool:
        """Whether DistributedDataParallel runs the model, and holds a bucket for each gradient."""
        return self.world_size > 1 and self.zero_stage < 2

    def rows(self, count: int) -> int:
        """Return how many of a tensor's rows this rank updates, and holds states of."""
        if self.world_size == 1 or self.zero_stage == 0:
            return count
        return len(chunk(range(count), self.size, self.rank))

    def weight_rows(self, count: int) -> int:
        """Return how many rows of a weight it holds: FSDP2 makes all parts equally large."""
        if self.world_size == 1 or self.zero_stage < 2:
            return count
        return math.ceil(count / self.size)


def shapes_of_count(num_parameters: int) -> list[Shape]:
    """Return shapes for a count alone: a matrix of whole blocks, and a vector of what is left."""
    rows, rest = divmod(num_parameters, BLOCK)
    return [(rows, BLOCK), (rest,)] if rest else [(rows, BLOCK)]


def plan(
    shapes: Iterable[Shape],
    master_weights: str,
    moments: str,
    rule_name: str,
    sharding: Sharding,
    *,
    released: bool = False,
    accumulated: bool = False,
) -> dict[str, Memory]:
    """Return what a rank holds ``at_step_entry`` and ``between_steps``.

    Args:
        shapes: of all parameters, BF16 weights, each once.
        master_weights: a setting of the optimizers, as ``moments``.
        moments: for all slots.
        rule_name: of ``RULES``; it has the slots.
        sharding: of the weights and of what goes with them.
        released: whether gradients are freed as they arrive.
        accumulated: whether they are added up in FP32 over several micro-batches.
    """
    sizes: dict[str, Counter[str]] = defaultdict(Counter)
    rule = RULES[rule_name]
    num_parameters = buckets = padded = own = 0
    for shape in shapes:
        first, *others = shape or (1,)
        inner, rows = math.prod(others), sharding.rows(first)
        weight = MASTER_WEIGHTS[WEIGHT][master_weights]
        num_parameters += math.prod(shape)
        buckets += first * inner
        padded += sharding.weight_rows(first) * inner
        own += rows * inner
        sizes["scalars"]["step"] += torch.float32.itemsize
        for key, plane in zip(weight_keys(weight), weight.planes[1:], strict=True):
            sizes["master_weights"][key] += _plane_bytes(plane, rows * inner)
        formats = slot_formats(moments, rule, torch.Size(shape))
        for slot, format in zip(rule.slots, formats, strict=True):
            for key, plane in zip(state_keys(format, slot.name), format.planes, strict=True):
                sizes["moments"][key] += _plane_bytes(plane, rows * inner)
    name, item = dtype_name(WEIGHT), WEIGHT.itemsize
    held = {"weights": {name: padded * item}}
    held |= {component: dict(planes) for component, planes in sizes.items()}
    idle = {"communication": {"buckets": buckets * item}} if sharding.has_buckets else {}
    if released:
        entering = idle
    elif accumulated:
        entering = {"gradients": {"float32": own * torch.float32.itemsize}, **idle}
    else:  # a bucket's gradients are views of it
        entering = {"gradients": {name: (buckets if idle else padded) * item}}
    return {
        "at_step_entry": Memory(num_parameters, {**held, **entering}),
        "between_steps": Memory(num_parameters, {**held, **idle}),
    }


def _plane_bytes(plane: Plane, elements: int) -> int:
    return elements // plane.block * plane.dtype.itemsize

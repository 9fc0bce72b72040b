"""Works with any bits in them, for tests of a backend beside the reference."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from bits import SPECIAL
from halfword import noise
from halfword.backends import Work
from halfword.formats import FORMATS, Format
from halfword.rules import RULES
from halfword.stored import Stored
from helpers import same

GRADIENTS = (torch.bfloat16, torch.float32, torch.float16)
WEIGHTS = [format for format in FORMATS.values() if format.block == 1]
SLOTS = [format for format in FORMATS.values() if len(format.planes) == 1]
GROUP = {
    "lr": 1e-2,
    "betas": (0.9, 0.95),
    "eps": 1e-8,
    "weight_decay": 0.1,
    "momentum": 0.9,
    "dampening": 0.5,
    "nesterov": False,
    "decoupled_weight_decay": False,
}


def combinations() -> list[tuple[str, Format, tuple[Format, ...]]]:
    """Return every rule with the formats of the weight and of each slot."""
    return [
        (rule, weight, slots)
        for rule, weight in product(RULES, WEIGHTS)
        for slots in _slot_formats(rule)
    ]


def name_of_formats(part: str | Format | tuple[Format, ...]) -> str:
    """Return a readable test id of a part of a combination."""
    if isinstance(part, tuple):
        return "+".join(format.name for format in part) or "none"
    return part if isinstance(part, str) else part.name


def make_works(
    rule: str,
    weight: Format,
    slots: tuple[Format, ...],
    sizes: Iterable[tuple[int, torch.dtype]],
) -> list[Work]:
    """Return a work of each number of elements and gradient dtype."""
    generator = torch.Generator().manual_seed(len(rule) + sum(map(ord, weight.name)))
    made = []
    for step, (count, dtype) in enumerate(sizes, start=1):
        scalars = torch.tensor(RULES[rule].scalars(GROUP, step), dtype=torch.float64).float()
        made.append(
            Work(
                rule=RULES[rule],
                scalars=tuple(scalars.tolist()),
                weight=_stored(weight, "weight", count, generator),
                slots=tuple(
                    _stored(format, slot.name, count, generator)
                    for slot, format in zip(RULES[rule].slots, slots, strict=True)
                ),
                gradient=random_bits(dtype, count, generator),
                gradient_scale=1.0 if step % 2 else -0.25,
                step=step,
            )
        )
    return made


def copies(all_works: list[Work]) -> list[Work]:
    """Return works with planes of their own."""

    def copy(stored: Stored) -> Stored:
        return replace(stored, planes=tuple(plane.clone() for plane in stored.planes))

    return [
        replace(work, weight=copy(work.weight), slots=tuple(map(copy, work.slots)), kept={})
        for work in all_works
    ]


def assert_same_planes(one: list[Work], other: list[Work]) -> None:
    """Two lists of works hold the same bits."""
    for a, b in zip(one, other, strict=True):
        for mine, theirs in zip((a.weight, *a.slots), (b.weight, *b.slots), strict=True):
            for plane, p, q in zip(mine.format.planes, mine.planes, theirs.planes, strict=True):
                where = f"{plane.name} of {mine.format.name}, {a.gradient.dtype} gradient"
                assert same(p, q), f"{where}, {a.gradient.numel()} elements"


def random_bits(dtype: torch.dtype, count: int, generator: torch.Generator) -> Tensor:
    """Return any patterns of ``dtype``, special values among them."""
    shape = (count, dtype.itemsize)
    bits = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    values = bits.view(dtype).view(count)
    if not dtype.is_floating_point:
        return values
    special = SPECIAL.repeat(count // len(SPECIAL) + 1)[:count].to(dtype)
    return torch.where(torch.rand(count, generator=generator) < 0.3, special, values)


def _slot_formats(rule: str) -> list[tuple[Format, ...]]:
    """Return the choices of formats; 8 bits are beside themselves, or FP32 in its other order."""
    slots = RULES[rule].slots
    blocks = [FORMATS["int8" if slot.signed else "uint8"] for slot in slots]
    in_blocks = product(*((block, FORMATS["fp32"]) for block in blocks))
    return [*product(SLOTS, repeat=len(slots)), *list(in_blocks)[:-1]]


def _stored(format: Format, state: str, count: int, generator: torch.Generator) -> Stored:
    planes = tuple(
        random_bits(plane.dtype, count // plane.block, generator) for plane in format.planes
    )
    return Stored(format, planes, noise.stream(5, 7, state))

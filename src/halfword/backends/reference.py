"""The reference backend: torch operations on any device. It is the definition of a step's bits."""

import functools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from halfword.backends.work import Work
from halfword.stored import tiles

logger = logging.getLogger(__name__)

SMALLEST_NORMAL = 2.0**-126


@dataclass(frozen=True)
class Update:
    """What one tile of a work goes through.

    Attributes:
        start: row-major index of its first element.
        tiles: of the weight and each slot, the planes' views.
        before: their FP32 values.
        after: their new FP32 values, not rounded to their formats yet.
    """

    start: int
    tiles: list[list[Tensor]]
    before: list[Tensor]
    after: list[Tensor]


def step(works: Sequence[Work]) -> None:
    """Take every tile of every work through decode, rule and encode."""
    for work in works:
        for update in updates(work):
            stored = (work.weight, *work.slots)
            for one, tile, value in zip(stored, update.tiles, update.after, strict=True):
                one.encode(value, tile, update.start, work.step)


def updates(work: Work) -> Iterator[Update]:
    """Decode a work tile by tile and apply its rule; nothing is written."""
    stored = (work.weight, *work.slots)
    planes = [plane for one in stored for plane in one.planes]
    for start, (gradient, *views) in tiles([work.gradient, *planes]):
        grouped = list(_grouped(views, [len(one.planes) for one in stored]))
        before = [one.decode(tile) for one, tile in zip(stored, grouped, strict=True)]
        x, *slots = before
        g = gradient.reshape(-1).float() * work.gradient_scale
        x, updated = work.rule.update(x, g, tuple(slots), work.scalars)
        after = [x, *map(flush_subnormals, updated)]
        yield Update(start, grouped, before, after)


@functools.cache
def say_once(reason: str) -> None:
    """Log why another backend leaves works to this one."""
    logger.warning("halfword runs its slower reference backend: %s", reason)


def flush_subnormals(x: Tensor) -> Tensor:
    """Write +0 for |x| < 2^-126: rows long without gradient would slow every CPU threefold."""
    return torch.where(x.abs() < SMALLEST_NORMAL, 0.0, x)


def _grouped(tile: list[Tensor], sizes: list[int]) -> Iterator[list[Tensor]]:
    first = 0
    for size in sizes:
        yield tile[first : first + size]
        first += size

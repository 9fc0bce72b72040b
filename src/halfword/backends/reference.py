"""The reference backend: torch operations on any device. It is the definition of a step's bits."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from halfword.backends.work import Work
from halfword.stored import tiles

SMALLEST_NORMAL = 2.0**-126


def step(works: Sequence[Work]) -> None:
    """Take every tile of every work through decode, rule and encode."""
    for work in works:
        stored = (work.weight, *work.slots)
        planes = [plane for one in stored for plane in one.planes]
        for start, (gradient, *tile) in tiles([work.gradient, *planes]):
            pieces = list(_grouped(tile, [len(one.planes) for one in stored]))
            x, *slots = (one.decode(piece) for one, piece in zip(stored, pieces, strict=True))
            g = gradient.reshape(-1).float() * work.gradient_scale
            x, updated = work.rule.update(x, g, tuple(slots), work.scalars)
            values = (x, *(flush_subnormals(slot) for slot in updated))
            for one, piece, value in zip(stored, pieces, values, strict=True):
                one.encode(value, piece, start)


def flush_subnormals(x: Tensor) -> Tensor:
    """Write +0 for |x| < 2^-126: rows long without gradient would slow every CPU threefold."""
    return torch.where(x.abs() < SMALLEST_NORMAL, 0.0, x)


def _grouped(tile: list[Tensor], sizes: list[int]) -> Iterator[list[Tensor]]:
    first = 0
    for size in sizes:
        yield tile[first : first + size]
        first += size

"""A number format together with the tensors that hold one parameter's values in it.

``Stored`` is the only place where formats meet memory: making planes, rebuilding them from the
parameter, and walking over them tile by tile so that nothing of the model's size is ever in FP32.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from halfword import noise
from halfword.formats import FORMATS, Format, Plane
from halfword.shards import WHOLE, Place, local, wrap

TILE = 1 << 16
"""Elements that are FP32 at one time: few enough for a cache, enough to hide Python's overhead."""


@dataclass(frozen=True)
class Stored:
    """Planes of one parameter or of one of its states.

    Of a sharded parameter they are what this rank holds.

    Attributes:
        format: how the planes are read.
        planes: the tensors, in the format's order, of the parameter's shape; the last dimension of
            a plane in blocks is shorter. Of a weight the first is the parameter.
        stream: selects the random bits of a stochastic format, see ``noise.stream``.
        place: where the planes' elements lie in the whole tensor.
    """

    format: Format
    planes: tuple[Tensor, ...]
    stream: int = 0
    place: Place = WHOLE

    def decode(self, tile: Sequence[Tensor]) -> Tensor:
        """Return the FP32 values, shape ``(count,)``, of this format's planes within one tile."""
        return self.format.decode([plane.reshape(-1) for plane in tile])

    def encode(self, x: Tensor, tile: Sequence[Tensor], start: int, step: int) -> None:
        """Write FP32 ``x``, shape ``(count,)``, into the tile that starts at index ``start``."""
        for plane, value in zip(tile, self.encoded(x, start, step), strict=True):
            plane.copy_(value.view(plane.shape))

    def encoded(self, x: Tensor, start: int, step: int) -> tuple[Tensor, ...]:
        """Return what ``encode`` would write, a tensor for each plane."""
        bits = None
        if self.format.stochastic:
            bits = self.place.noise(noise.key(self.stream, step), start, x.numel(), x.device)
        return self.format.encode(x, bits)


def state_keys(format: Format, slot: str) -> list[str]:
    """Return the state keys of a slot kept in ``format``: ``exp_avg``, ``exp_avg_bf16``."""
    return [f"{slot}_{plane.name}" if plane.name else slot for plane in format.planes]


def weight_keys(format: Format) -> list[str]:
    """Return the optimizer-state keys of a weight format: those of all planes but the parameter."""
    return [plane.name for plane in format.planes[1:]]


WEIGHT_KEYS = {key for format in FORMATS.values() for key in weight_keys(format)}
"""Every optimizer-state key that belongs to a master weight."""


def plane_shape(plane: Plane, parameter: Tensor) -> torch.Size:
    """Return the shape of a plane of ``parameter`` or of its states: one entry for each block."""
    shape = parameter.shape
    if plane.block == 1 or not shape:
        return shape
    return torch.Size((*shape[:-1], shape[-1] // plane.block))


def make_slot(format: Format, slot: str, parameter: Tensor) -> dict[str, Tensor]:
    """Return a slot's planes, all zero, with the parameter's shape, strides and device.

    A plane in blocks has the shape that ``plane_shape`` gives, and is contiguous.
    """
    return dict(zip(state_keys(format, slot), _zeros(format.planes, parameter), strict=True))


def make_weight(format: Format, parameter: Tensor) -> dict[str, Tensor]:
    """Return the planes beside ``parameter`` that make its master weight what it shows now."""
    planes = dict(zip(weight_keys(format), _zeros(format.planes[1:], parameter), strict=True))
    adopt(Stored(format, (local(parameter.detach()), *map(local, planes.values()))))
    return planes


def adopt(weight: Stored) -> None:
    """Rebuild the other planes of a weight from the parameter: its master is then what it shows."""
    if len(weight.planes) == 1:
        return
    for _, (parameter, *others) in tiles(weight.planes):
        rebuilt = weight.format.encode(parameter.reshape(-1).float(), None)
        for plane, value in zip(others, rebuilt[1:], strict=True):
            plane.copy_(value.view(plane.shape))


def decode_all(stored: Stored) -> Tensor:
    """Return the FP32 values in full, with the shape and strides of the first plane."""
    result = torch.empty_like(stored.planes[0], dtype=torch.float32)
    for _, (target, *tile) in tiles((result, *stored.planes)):
        target.copy_(stored.decode(tile).view(target.shape))
    return result


def transcode(source: Stored, target: Stored, step: int) -> None:
    """Write the values of ``source`` in the format of ``target``, with the noise of ``step``."""
    count = len(source.planes)
    for start, tile in tiles((*source.planes, *target.planes)):
        target.encode(source.decode(tile[:count]), tile[count:], start, step)


def write_all(stored: Stored, values: Tensor, step: int) -> None:
    """Write ``values`` of the planes' shape, rounded to FP32 first if they are wider."""
    device = stored.planes[0].device
    transcode(Stored(FORMATS["fp32"], (values.to(device, torch.float32),)), stored, step)


def zero(stored: Stored) -> None:
    """Make every value zero."""
    for plane in stored.planes:
        plane.zero_()


def tiles(tensors: Sequence[Tensor]) -> Iterator[tuple[int, list[Tensor]]]:
    """Walk tensors of one shape together, at most ``TILE`` elements at a time.

    Args:
        tensors: the first has one entry for each element; the last dimension of the others may be
            shorter by a whole number, a block that divides ``TILE``.

    Yields:
        The row-major index of the tile's first element, and a view of each tensor: the same box of
        each, whatever their strides, so that reading a view in row-major order reads consecutive
        indices. No box cuts a block.
    """
    if all(tensor.is_contiguous() for tensor in tensors):  # empty and 0-dim ones always are
        tensors = [tensor.view(-1) for tensor in tensors]
    shape = tensors[0].shape
    cut = next(d for d in range(len(shape)) if math.prod(shape[d + 1 :]) <= TILE)
    inner = math.prod(shape[cut + 1 :])  # elements of one index of the dimension that is cut
    chunk = TILE // inner
    blocks = [shape[cut] // max(1, tensor.shape[cut]) for tensor in tensors]
    for outer, index in enumerate(product(*(range(size) for size in shape[:cut]))):
        boxes = [tensor[index] for tensor in tensors]
        for begin in range(0, shape[cut], chunk):
            start = (outer * shape[cut] + begin) * inner
            yield (
                start,
                [
                    box[begin // block : (begin + chunk) // block]
                    for box, block in zip(boxes, blocks, strict=True)
                ],
            )


def _zeros(planes: Sequence[Plane], parameter: Tensor) -> list[Tensor]:
    def zeros(plane: Plane) -> Tensor:
        if plane.block == 1:
            return torch.zeros_like(parameter, dtype=plane.dtype, requires_grad=False)
        own = local(parameter)
        zeros = own.new_zeros(plane_shape(plane, own), dtype=plane.dtype)
        return wrap(zeros, parameter, plane_shape(plane, parameter))

    return [zeros(plane) for plane in planes]

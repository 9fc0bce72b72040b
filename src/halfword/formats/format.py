"""What a number format is made of."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Encode = Callable[[Tensor, Tensor | None], tuple[Tensor, ...]]
Decode = Callable[[Sequence[Tensor]], Tensor]


@dataclass(frozen=True)
class Plane:
    """One stored tensor of a format.

    Attributes:
        name: what its state key is made of; "" for the plain FP32 plane.
        dtype: the stored dtype.
        block: how many elements along the last dimension one entry covers.
    """

    name: str
    dtype: torch.dtype
    block: int = 1


@dataclass(frozen=True)
class Format:
    """A way to keep FP32 values.

    Attributes:
        name: its name in ``FORMATS``.
        planes: the stored tensors; of a weight format the first is the parameter itself.
        precision: significant bits that a value may have, the implicit one included. All formats
            have FP32's exponent range, so one that gives each element its own exponent holds every
            value of another whose precision is no larger.
        encode: ``(fp32, noise) -> planes``; noise is an int32 tensor of 16 random bits an
            element for stochastic formats, else None.
        decode: ``planes -> fp32``, defined for every bit pattern.
        stochastic: whether ``encode`` needs noise.
    """

    name: str
    planes: tuple[Plane, ...]
    precision: int
    encode: Encode
    decode: Decode
    stochastic: bool = False

    @property
    def bytes_per_element(self) -> float:
        """Bytes that one element takes over all planes."""
        return sum(plane.dtype.itemsize / plane.block for plane in self.planes)

    @property
    def block(self) -> int:
        """Elements along the last dimension that share an entry of some plane; else 1."""
        return max(plane.block for plane in self.planes)

    def holds(self, other: "Format") -> bool:
        """Whether every value of ``other`` is a value of this format."""
        return self is other or (self.block == 1 and self.precision >= other.precision)

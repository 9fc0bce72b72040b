"""Moments in 8 bits: codes of 64 neighbours along the last dimension share a scale.

A signed moment is a multiple of the scale. A non-negative one takes levels that are close together
near zero and 1/32 to 1/64 apart further up, since a second moment matters by its ratio. Rounding is
stochastic: to nearest, a second moment at beta2 = 0.999 would never move (docs/decisions/0007 has
what was measured).

Every operation rounds once, and noise is added to bit patterns as for BF16.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from halfword.formats.format import Format, Plane

BLOCK = 64
SMALLEST = 4096
"""Elements below which a tensor is not worth quantizing."""


@dataclass(frozen=True)
class _Code:
    """One way to write the values of a block.

    Attributes:
        top: the level of the largest value.
        least: the smallest scale of a block that is not zero; no level times it is subnormal.
        magnitude: what the scale of a block has to cover, NaN for values that cannot be written.
        nearby: ``(x, 1 / scale, noise) -> codes`` as int32: one of the two levels around a value.
        level: codes to their levels, in FP32.
    """

    top: float
    least: float
    magnitude: Callable[[Tensor], Tensor]
    nearby: Callable[[Tensor, Tensor, Tensor], Tensor]
    level: Callable[[Tensor], Tensor]

    def encode(self, x: Tensor, noise: Tensor | None) -> tuple[Tensor, ...]:
        """Return codes, shape ``(count,)`` int32, and scales, shape ``(count / BLOCK,)``."""
        assert noise is not None
        x, noise = x.view(-1, BLOCK), noise.view(-1, BLOCK)
        largest = self.magnitude(x).amax(1, keepdim=True)
        # By tensors: torch multiplies by the reciprocal where one side is a number.
        top = torch.full_like(largest, self.top)
        scale = (largest / top).clamp(min=self.least)
        scale = torch.where(largest == 0, 0.0, torch.where(largest.isfinite(), scale, torch.nan))
        inverse = (top / largest).clamp(max=1 / self.least)
        codes = torch.where(scale.isnan(), 0, self.nearby(x, inverse, noise))
        return codes.view(-1), scale.view(-1)

    def decode(self, planes: Sequence[Tensor]) -> Tensor:
        """Return the FP32 values, shape ``(count,)``."""
        codes, scale = planes
        return (self.level(codes).view(-1, BLOCK) * scale.view(-1, 1)).view(-1)


def _signed_nearby(x: Tensor, inverse: Tensor, noise: Tensor) -> Tensor:
    """Round ``x / scale`` to a whole number, whose unit is bit 14 of the pattern of 768 plus it."""
    bits = (x * inverse + 768.0).view(torch.int32) + (noise >> 2)
    return (bits >> 14) - _BITS_OF_768


def _unsigned_nearby(x: Tensor, inverse: Tensor, noise: Tensor) -> Tensor:
    """Round ``x / scale + 2`` to 5 bits below its leading one; what is positive stays so."""
    bits = (x * inverse + 2.0).view(torch.int32) + (noise << 2)
    return torch.maximum((bits >> 18) - _BITS_OF_2, (x > 0).to(torch.int32))


def _unsigned_level(codes: Tensor) -> Tensor:
    return ((codes.to(torch.int32) + _BITS_OF_2) << 18).view(torch.float32) - 2.0


_BITS_OF_768 = 0x44400000 >> 14
_BITS_OF_2 = 0x40000000 >> 18

_SIGNED = _Code(
    top=127.0,
    least=2.0**-126,
    magnitude=torch.abs,
    nearby=_signed_nearby,
    level=lambda codes: codes.float(),
)
_UNSIGNED = _Code(
    top=502.0,
    least=2.0**-122,
    magnitude=lambda x: torch.where(x >= 0, x, torch.nan),
    nearby=_unsigned_nearby,
    level=_unsigned_level,
)


def _format(name: str, dtype: torch.dtype, code: _Code) -> Format:
    def encode(x: Tensor, noise: Tensor | None) -> tuple[Tensor, ...]:
        codes, scales = code.encode(x, noise)
        return codes.to(dtype), scales

    planes = Plane("code", dtype), Plane("scale", torch.float32, BLOCK)
    return Format(name, planes, 24, encode, code.decode, stochastic=True)


int8 = _format("int8", torch.int8, _SIGNED)
uint8 = _format("uint8", torch.uint8, _UNSIGNED)

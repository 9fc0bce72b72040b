"""Split master weights: the BF16 weight plus a signed remainder are one wider number.

With ``u`` the FP32 bit pattern, ``u = 65536 * hi + remainder``: rounding to nearest, ties away from
zero, leaves a remainder that fits 16 signed bits, so weight and remainder together are FP32 to the
last bit (the encoding of ``store_param_remainders`` in Transformer Engine and Apex). Unlike theirs,
NaN stays NaN, and every pair of patterns decodes to a value that rounds to the weight.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from halfword.formats.format import Format, Plane
from halfword.formats.rounding import bf16_bits, bf16_from_bits, fp32_bits


def _encode_split(x: Tensor, noise: Tensor | None) -> tuple[Tensor, ...]:
    u = fp32_bits(x)
    return bf16_from_bits((u + 0x8000) >> 16), u.to(torch.int16)


def _decode_split(planes: Sequence[Tensor]) -> Tensor:
    weight, remainder = planes
    u = (bf16_bits(weight) << 16) + remainder
    return _numbers_only(u.view(torch.float32), weight)


def _encode_split24(x: Tensor, noise: Tensor | None) -> tuple[Tensor, ...]:
    u24 = (fp32_bits(x) + 0x80) >> 8  # the number rounded to 24 bits, ties away from zero
    return bf16_from_bits((u24 + 0x80) >> 8), u24.to(torch.int8)


def _decode_split24(planes: Sequence[Tensor]) -> Tensor:
    weight, remainder = planes
    u24 = (bf16_bits(weight) << 8) + remainder
    return _numbers_only((u24 << 8).view(torch.float32), weight)


def _numbers_only(x: Tensor, weight: Tensor) -> Tensor:
    """Read the weight alone where a stale remainder beside zero or Inf would make a NaN."""
    return torch.where(x.isnan(), weight.float(), x)


split = Format(
    "split",
    (Plane("weight", torch.bfloat16), Plane("remainder", torch.int16)),
    24,
    _encode_split,
    _decode_split,
)
split24 = Format(
    "split24",
    (Plane("weight", torch.bfloat16), Plane("remainder8", torch.int8)),
    16,
    _encode_split24,
    _decode_split24,
)

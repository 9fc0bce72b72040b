"""Rounding FP32 to BF16 in integer arithmetic, so that every backend gives the same bits.

``Tensor.bfloat16()`` is not used: vector paths differ in the NaN they write, and Triton's
interpreter truncates. All functions take FP32 tensors; BF16 patterns travel as int32 with the sign
bit at 15.
"""

import torch
from torch import Tensor

NAN_PATTERN = 0x7FC0  # the one NaN that every rounding encode writes


def fp32_bits(x: Tensor) -> Tensor:
    """Return the int32 bit patterns of FP32 ``x``, with every NaN made the one NaN."""
    return torch.where(x.isnan(), NAN_PATTERN << 16, x.view(torch.int32))


def bf16_from_bits(upper: Tensor) -> Tensor:
    """Return BF16 values from the low 16 bits of int32 ``upper``."""
    return upper.to(torch.int16).view(torch.bfloat16)


def bf16_bits(values: Tensor) -> Tensor:
    """Return the bit patterns of BF16 ``values``, sign-extended to int32."""
    return values.view(torch.int16).to(torch.int32)


def nearest_even(x: Tensor) -> Tensor:
    """Round FP32 to the nearest BF16, ties to even; overflow becomes Inf."""
    u = fp32_bits(x)
    return bf16_from_bits((u + (0x7FFF + ((u >> 16) & 1))) >> 16)


def nearest_away(x: Tensor) -> Tensor:
    """Round FP32 to the nearest BF16, ties away from zero; overflow becomes Inf."""
    return bf16_from_bits((fp32_bits(x) + 0x8000) >> 16)


def stochastic(x: Tensor, noise: Tensor) -> Tensor:
    """Round FP32 to one of its two BF16 neighbours, up with the probability that makes it unbiased.

    Args:
        x: FP32 values; Inf and NaN pass through.
        noise: 16 random bits for each, int32 of the same shape.
    """
    u = fp32_bits(x)
    rounded = u + noise
    return bf16_from_bits(torch.where(x.isfinite(), rounded, u) >> 16)

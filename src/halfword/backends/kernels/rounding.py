"""Rounding FP32 to BF16 on bit patterns, as formats/rounding.py; BF16 is in the upper half."""

import triton
import triton.language as tl


@triton.jit
def as_float(u):
    return u.to(tl.float32, bitcast=True)


@triton.jit
def fp32_bits(x):
    return tl.where(x != x, 0x7FC00000, x.to(tl.int32, bitcast=True))


@triton.jit
def nearest_even(x):
    u = fp32_bits(x)
    return ((u + (0x7FFF + ((u >> 16) & 1))) >> 16).to(tl.int16)


@triton.jit
def nearest_away(x):
    return ((fp32_bits(x) + 0x8000) >> 16).to(tl.int16)


@triton.jit
def stochastic(x, noise):
    """Round up with the probability that makes it unbiased.

    An Inf stays one: its lower half is 0, and noise does not carry out of that.
    """
    return ((fp32_bits(x) + noise) >> 16).to(tl.int16)

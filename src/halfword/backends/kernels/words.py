"""The words of ops.py: what a printed rule may call, each rounded once; scalars are float64."""

import triton
import triton.language as tl


@triton.jit
def sqrt(x):
    return tl.sqrt_rn(x)


@triton.jit
def sign(x):
    return tl.where(x != x, x, (x > 0.0).to(tl.float32) - (x < 0.0).to(tl.float32))


@triton.jit
def flush_subnormals(x):
    """What the step writes for a slot's value: +0 for |x| < 2^-126."""
    return tl.where(tl.abs(x) < 1.1754943508222875e-38, 0.0, x)


@triton.jit
def scalar_sqrt(x):
    return tl.sqrt(x)


@triton.jit
def scalar_power(base, exponent):
    """By squaring, lowest bit first, as ops.py; steps are counted in FP32, whole up to 2^24."""
    bits = exponent.to(tl.int32)
    result = exponent * 0.0 + 1.0
    for _ in range(24):
        result = tl.where((bits & 1) == 1, result * base, result)
        base = base * base
        bits = bits >> 1
    return result

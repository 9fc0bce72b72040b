"""Codes of 8 bits with a scale for each block of neighbours, as formats/block8.py."""

import triton
import triton.language as tl

from halfword.backends.kernels.rounding import as_float

BLOCK = tl.constexpr(64)
INFINITY = tl.constexpr(float("inf"))
BITS_OF_768 = tl.constexpr(0x44400000 >> 14)
BITS_OF_2 = tl.constexpr(0x40000000 >> 18)


@triton.jit
def decode_int8(codes, scales):
    return _scaled(codes.to(tl.float32), scales)


@triton.jit
def encode_int8(x, noise):
    scales, inverses = _scales(tl.abs(x), 127.0, 2.0**-126)
    bits = (_rows(x) * inverses + 768.0).to(tl.int32, bitcast=True) + (_rows(noise) >> 2)
    return _codes((bits >> 14) - BITS_OF_768, scales).to(tl.int8), _flat(scales)


@triton.jit
def decode_uint8(codes, scales):
    return _scaled(as_float((codes.to(tl.int32) + BITS_OF_2) << 18) - 2.0, scales)


@triton.jit
def encode_uint8(x, noise):
    scales, inverses = _scales(tl.where(x >= 0.0, x, INFINITY), 502.0, 2.0**-122)
    bits = (_rows(x) * inverses + 2.0).to(tl.int32, bitcast=True) + (_rows(noise) << 2)
    codes = tl.maximum((bits >> 18) - BITS_OF_2, (_rows(x) > 0.0).to(tl.int32))
    return _codes(codes, scales).to(tl.uint8), _flat(scales)


@triton.jit
def _scales(magnitude, top, least):
    """Return the scale of each block, NaN where it cannot be written, and what to multiply by."""
    # As Inf, a NaN is among the largest.
    magnitude = tl.where(magnitude == magnitude, magnitude, INFINITY)
    largest = tl.max(_rows(magnitude), axis=1, keep_dims=True)
    tops = tl.full(largest.shape, top, tl.float32)
    scale = tl.maximum(tl.div_rn(largest, tops), least)
    scale = tl.where(largest < INFINITY, scale, float("nan"))
    inverse = tl.minimum(tl.div_rn(tops, largest), 1.0 / least)
    return tl.where(largest == 0.0, 0.0, scale), inverse


@triton.jit
def _codes(codes, scales):
    return _flat(tl.where(scales == scales, codes, 0))


@triton.jit
def _scaled(levels, scales):
    return _flat(_rows(levels) * tl.reshape(scales, (scales.shape[0], 1)))


@triton.jit
def _rows(values):
    return tl.reshape(values, (values.shape[0] // BLOCK, BLOCK))


@triton.jit
def _flat(rows):
    return tl.reshape(rows, (rows.shape[0] * rows.shape[1],))

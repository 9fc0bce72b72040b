"""The BF16 weight plus a signed remainder are one wider number, as formats/split.py."""

import triton
import triton.language as tl

from halfword.backends.kernels.rounding import as_float, fp32_bits


@triton.jit
def decode_split(weight, remainder):
    u = (weight.to(tl.int32) << 16) + remainder.to(tl.int32)
    return _numbers_only(u, weight)


@triton.jit
def encode_split(x):
    u = fp32_bits(x)
    return ((u + 0x8000) >> 16).to(tl.int16), u.to(tl.int16)


@triton.jit
def decode_split24(weight, remainder):
    u24 = (weight.to(tl.int32) << 8) + remainder.to(tl.int32)
    return _numbers_only(u24 << 8, weight)


@triton.jit
def encode_split24(x):
    u24 = (fp32_bits(x) + 0x80) >> 8
    return ((u24 + 0x80) >> 8).to(tl.int16), u24.to(tl.int8)


@triton.jit
def _numbers_only(u, weight):
    """Read the weight alone where a stale remainder beside zero or Inf would make a NaN."""
    x = as_float(u)
    return tl.where(x != x, as_float(weight.to(tl.int32) << 16), x)

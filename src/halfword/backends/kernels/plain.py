"""FP32 and nearest-rounded BF16, as formats/plain.py."""

import triton
import triton.language as tl

from halfword.backends.kernels.rounding import as_float, nearest_even


@triton.jit
def decode_fp32(x):
    return x


@triton.jit
def encode_fp32(x):
    return x


@triton.jit
def decode_bf16(plane):
    return as_float(plane.to(tl.int32) << 16)


@triton.jit
def encode_bf16(x):
    return nearest_even(x)

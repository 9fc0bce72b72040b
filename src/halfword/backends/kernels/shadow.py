"""A low-precision weight beside an FP32 copy, as formats/shadow.py."""

import triton
import triton.language as tl

from halfword.backends.kernels.half import decode_fp16, encode_fp16
from halfword.backends.kernels.rounding import as_float, nearest_away


@triton.jit
def decode_bf16_fp32(weight, copy):
    return _the_copy_if(nearest_away(copy) == weight, copy, as_float(weight.to(tl.int32) << 16))


@triton.jit
def encode_bf16_fp32(x):
    return nearest_away(x), x


@triton.jit
def decode_fp16_fp32(weight, copy):
    return _the_copy_if(encode_fp16(copy) == weight, copy, decode_fp16(weight))


@triton.jit
def encode_fp16_fp32(x):
    return encode_fp16(x), x


@triton.jit
def _the_copy_if(same, copy, alone):
    both_nan = (copy != copy) & (alone != alone)
    return tl.where(same | both_nan, copy, alone)

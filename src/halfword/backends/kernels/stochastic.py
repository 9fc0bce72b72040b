"""BF16 with stochastic rounding, as formats/stochastic.py."""

import triton
import triton.language as tl

from halfword.backends.kernels.rounding import as_float, stochastic


@triton.jit
def decode_bf16_sr(plane):
    return as_float(plane.to(tl.int32) << 16)


@triton.jit
def encode_bf16_sr(x, noise):
    return stochastic(x, noise)

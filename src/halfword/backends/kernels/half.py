"""FP16 as int16 patterns."""

import triton
import triton.language as tl


@triton.jit
def decode_fp16(plane):
    return plane.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def encode_fp16(x):
    """Round to nearest, ties to even; every NaN becomes the one that torch writes."""
    return tl.where(x != x, 0x7E00, x.to(tl.float16).to(tl.int16, bitcast=True)).to(tl.int16)

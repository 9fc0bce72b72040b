"""BF16 products that cost what FP32 ones do on a CPU without BF16 instructions.

torch multiplies BF16 there one element at a time, 10 to 60 times slower than FP32. Raising the
operands to FP32, multiplying, and rounding the result once is what a BF16 matrix unit computes
(exact products, FP32 sums, one rounding), so the numerics of a run do not depend on the route.
What autograd keeps for the backward pass is BF16 on both routes.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

BF16_INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16")

_is_in_hardware = False


@functools.cache
def native_bf16_matmul(device_type: str) -> bool:
    """Whether a kind of device multiplies BF16 matrices in hardware."""
    if device_type != "cpu":
        return True
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in BF16_INSTRUCTIONS)


@contextlib.contextmanager
def as_in_hardware() -> Iterator[None]:
    """Take the route of devices with BF16 instructions, whatever this one has: for plans."""
    global _is_in_hardware
    before, _is_in_hardware = _is_in_hardware, True
    try:
        yield
    finally:
        _is_in_hardware = before


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply by a transposed weight: (..., in) times (out, in) gives (..., out)."""
    if _raise_to_fp32(x):
        product: Tensor = _LinearInFP32.apply(x, weight)  # type: ignore[no-untyped-call]
        return product
    return F.linear(x, weight)


def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention over (batch, heads, seq, head_dim); key and value may have fewer heads."""
    grouped = query.shape[1] != key.shape[1]
    dtype = query.dtype
    if _raise_to_fp32(query):
        query, key, value = query.float(), key.float(), value.float()
    mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
    return mixed.to(dtype)


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """Look up rows; a row's gradient is summed in FP32 and rounded once.

    torch's CPU kernel sums BF16 gradients in BF16, which loses a few percent of the row of a
    frequent token.
    """
    rows: Tensor = _EmbeddingSummedInFP32.apply(ids, weight)  # type: ignore[no-untyped-call]
    return rows


def _raise_to_fp32(x: Tensor) -> bool:
    is_native = _is_in_hardware or native_bf16_matmul(x.device.type)
    return x.dtype == torch.bfloat16 and not is_native


class _LinearInFP32(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x.float(), weight.float()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors  # (..., in) bf16, (out, in) bf16
        grad32 = grad.float()  # (..., out) fp32
        x_grad = (grad32 @ weight.float()).to(x.dtype)
        weight_grad = grad32.flatten(0, -2).t() @ x.float().flatten(0, -2)
        return x_grad, weight_grad.to(weight.dtype)


class _EmbeddingSummedInFP32(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.num_rows = weight.shape[0]
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        (ids,) = ctx.saved_tensors
        sums = torch.ops.aten.embedding_dense_backward(grad.float(), ids, ctx.num_rows, -1, False)
        return None, sums.to(grad.dtype)

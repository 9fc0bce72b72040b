"""FP32 and nearest-rounded BF16: one plane, no state beside it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from halfword.formats.format import Format, Plane
from halfword.formats.rounding import nearest_even


def _identity(x: Tensor, noise: Tensor | None) -> tuple[Tensor, ...]:
    return (x,)


def _round(x: Tensor, noise: Tensor | None) -> tuple[Tensor, ...]:
    return (nearest_even(x),)


def _widen(planes: Sequence[Tensor]) -> Tensor:
    return planes[0].float()


fp32 = Format("fp32", (Plane("", torch.float32),), 24, _identity, _widen)
bf16 = Format("bf16", (Plane("bf16", torch.bfloat16),), 8, _round, _widen)

"""A low-precision weight with a separate FP32 copy: the master weights everyone knows.

Nothing watches who writes the weight, so each decode compares: the copy counts where it rounds to
the weight, else the weight was written from outside and wins.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from halfword.formats.format import Format, Plane
from halfword.formats.rounding import nearest_away

_COPY = Plane("master_weight", torch.float32)


def _fp16_nearest_even(x: Tensor) -> Tensor:
    return torch.where(x.isnan(), torch.nan, x).half()


def _shadow(name: str, dtype: torch.dtype, rounded: Callable[[Tensor], Tensor]) -> Format:
    def encode(x: Tensor, noise: Tensor | None) -> tuple[Tensor, ...]:
        return rounded(x), x

    def decode(planes: Sequence[Tensor]) -> Tensor:
        weight, copy = planes
        same = rounded(copy).view(torch.int16) == weight.view(torch.int16)
        both_nan = copy.isnan() & weight.isnan()
        return torch.where(same | both_nan, copy, weight.float())

    return Format(name, (Plane("weight", dtype), _COPY), 24, encode, decode)


bf16_shadow = _shadow("bf16+fp32", torch.bfloat16, nearest_away)
fp16_shadow = _shadow("fp16+fp32", torch.float16, _fp16_nearest_even)

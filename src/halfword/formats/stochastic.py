"""BF16 with stochastic rounding: unbiased, so small updates survive on average."""

from collections.abc import Sequence

import torch
from torch import Tensor

from halfword.formats.format import Format, Plane
from halfword.formats.rounding import stochastic


def _encode(x: Tensor, noise: Tensor | None) -> tuple[Tensor, ...]:
    assert noise is not None
    return (stochastic(x, noise),)


def _decode(planes: Sequence[Tensor]) -> Tensor:
    return planes[0].float()


bf16_sr = Format("bf16-sr", (Plane("bf16", torch.bfloat16),), 8, _encode, _decode, stochastic=True)

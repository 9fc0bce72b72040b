"""Lion (Chen et al., arXiv:2302.06675): the sign of an interpolated momentum."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from halfword.ops import sign
from halfword.rules.rule import Rule, Slot


def _scalars(group: Mapping[str, Any], step: int) -> tuple[float, ...]:
    beta1, beta2 = group["betas"]
    return group["lr"], 1 - beta1, 1 - beta2, group["lr"] * group["weight_decay"]


def _lion(
    x: Tensor, g: Tensor, slots: tuple[Tensor, ...], scalars: tuple[float, ...]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    (m,) = slots
    lr, one_minus_beta1, one_minus_beta2, decay = scalars
    x = x - (lr * sign(m + one_minus_beta1 * (g - m)) + decay * x)
    m = m + one_minus_beta2 * (g - m)
    return x, (m,)


lion = Rule("lion", (Slot("exp_avg", signed=True),), _scalars, _lion)

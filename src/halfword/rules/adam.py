"""Adam (Kingma and Ba, arXiv:1412.6980) and AdamW (Loshchilov and Hutter, arXiv:1711.05101).

Bias correction is folded into the step size and epsilon, algebraically as torch has it, so that an
element costs one square root and one division.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from halfword.ops import power, sqrt
from halfword.rules.rule import Rule, Slot

_MOMENTS = (Slot("exp_avg", signed=True), Slot("exp_avg_sq", signed=False))


def _adam_scalars(group: Mapping[str, Any], step: int) -> tuple[float, ...]:
    beta1, beta2 = group["betas"]
    correction = sqrt(1 - power(beta2, step))
    alpha = group["lr"] * correction / (1 - power(beta1, step))
    return alpha, group["eps"] * correction, 1 - beta1, beta2, 1 - beta2


def _adamw_scalars(group: Mapping[str, Any], step: int) -> tuple[float, ...]:
    return *_adam_scalars(group, step), group["lr"] * group["weight_decay"]


def _coupled_scalars(group: Mapping[str, Any], step: int) -> tuple[float, ...]:
    return *_adam_scalars(group, step), group["weight_decay"]


def _adamw(
    x: Tensor, g: Tensor, slots: tuple[Tensor, ...], scalars: tuple[float, ...]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    m, v = slots
    alpha, epsilon, one_minus_beta1, beta2, one_minus_beta2, decay = scalars
    m = m + one_minus_beta1 * (g - m)
    v = beta2 * v + (one_minus_beta2 * g) * g
    x = x - (alpha * (m / (sqrt(v) + epsilon)) + decay * x)
    return x, (m, v)


def _adam(
    x: Tensor, g: Tensor, slots: tuple[Tensor, ...], scalars: tuple[float, ...]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    alpha, epsilon, one_minus_beta1, beta2, one_minus_beta2, weight_decay = scalars
    no_decay = (alpha, epsilon, one_minus_beta1, beta2, one_minus_beta2, 0.0)
    return _adamw(x, g + weight_decay * x, slots, no_decay)


adamw = Rule("adamw", _MOMENTS, _adamw_scalars, _adamw)
adam = Rule("adam", _MOMENTS, _coupled_scalars, _adam)

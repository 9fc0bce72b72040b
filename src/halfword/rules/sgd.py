"""Stochastic gradient descent, with or without momentum (Sutskever et al., ICML 2013, as in torch).

Without momentum there is no buffer to keep, hence two rules.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from halfword.ops import where
from halfword.rules.rule import Rule, Slot


def _decays(group: Mapping[str, Any]) -> tuple[float, float]:
    """Return (coupled, decoupled) decay: the one goes through the gradient, the other past it."""
    if group["decoupled_weight_decay"]:
        return 0.0, group["lr"] * group["weight_decay"]
    return group["weight_decay"], 0.0


def _plain_scalars(group: Mapping[str, Any], step: int) -> tuple[float, ...]:
    return group["lr"], *_decays(group)


def _momentum_scalars(group: Mapping[str, Any], step: int) -> tuple[float, ...]:
    first = 2.0 - step  # positive at the first step alone
    momentum, dampening, nesterov = group["momentum"], group["dampening"], group["nesterov"]
    return group["lr"], *_decays(group), momentum, 1 - dampening, first, float(nesterov)


def _plain(
    x: Tensor, g: Tensor, slots: tuple[Tensor, ...], scalars: tuple[float, ...]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    lr, coupled, decay = scalars
    g = where(coupled > 0.0, g + coupled * x, g)
    x = x - (lr * g + decay * x)
    return x, slots


def _momentum(
    x: Tensor, g: Tensor, slots: tuple[Tensor, ...], scalars: tuple[float, ...]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    (b,) = slots
    lr, coupled, decay, momentum, one_minus_dampening, first, nesterov = scalars
    g = where(coupled > 0.0, g + coupled * x, g)
    b = where(first > 0.0, g, momentum * b + one_minus_dampening * g)
    step = where(nesterov > 0.0, g + momentum * b, b)
    x = x - (lr * step + decay * x)
    return x, (b,)


_BUFFER = (Slot("momentum_buffer", signed=True),)

sgd = Rule("sgd", (), _plain_scalars, _plain, optional=_BUFFER)
sgd_momentum = Rule("sgd_momentum", _BUFFER, _momentum_scalars, _momentum, optional=_BUFFER)

"""AdamW, Adam, Lion and SGD: the arguments of ``torch.optim``, and which rule they mean.

Every class takes, beside its namesake's arguments:

* ``master_weights``: how the FP32 master of each low-precision weight is kept. ``auto`` (``split``
  for BF16, ``fp32`` for FP16), ``split`` (2 bytes, exact), ``split24`` (1 byte, 16 bits precise),
  ``fp32`` (4 bytes, exact), ``bf16`` and ``bf16-sr`` (none; rounded to nearest or stochastically).
* ``moments``: how the states are kept, one setting or one for each state: ``fp32``, ``bf16``,
  ``bf16-sr``, ``int8`` (in blocks of 64; vectors and small tensors stay FP32).
* ``seed``: of the stochastic rounding.
* ``on_nonfinite``: what a step does on an Inf or NaN gradient: ``propagate``, ``skip``, ``raise``.
* ``backend``: ``auto`` or a name; all backends give the same bits.

``foreach`` and ``fused`` are accepted as torch accepts them: they choose an implementation, never
bits. All raise ValueError for a setting that cannot be honoured.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from halfword.optimizer import Optimizer
from halfword.rules import RULES, Rule


class AdamW(Optimizer):
    """AdamW (arXiv:1711.05101) with exact master weights; a drop-in for ``torch.optim.AdamW``.

    >>> import torch
    >>> model = torch.nn.Linear(4, 2).bfloat16()
    >>> opt = AdamW(model.parameters(), lr=1e-3)
    >>> model(torch.ones(1, 4).bfloat16()).sum().backward()
    >>> opt.step()
    >>> opt.master_weight(model.weight).dtype
    torch.float32
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        master_weights: str = "auto",
        moments: str | tuple[str, str] = "fp32",
        seed: int = 0,
        on_nonfinite: str = "propagate",
        backend: str = "auto",
    ) -> None:
        super().__init__(params, _defaults(locals()))

    def rule(self, group: Mapping[str, Any]) -> Rule:
        """Return the AdamW rule."""
        return RULES["adamw"]


class Adam(Optimizer):
    """Adam (arXiv:1412.6980), decay through the gradient; a drop-in for ``torch.optim.Adam``.

    ``decoupled_weight_decay=True`` makes it AdamW.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        master_weights: str = "auto",
        moments: str | tuple[str, str] = "fp32",
        seed: int = 0,
        on_nonfinite: str = "propagate",
        backend: str = "auto",
    ) -> None:
        super().__init__(params, _defaults(locals()))

    def rule(self, group: Mapping[str, Any]) -> Rule:
        """Return the Adam rule, or AdamW's where the group's decay is decoupled."""
        return RULES["adamw" if group["decoupled_weight_decay"] else "adam"]


class Lion(Optimizer):
    """Lion (arXiv:2302.06675): one moment; a learning rate 3 to 10 times smaller than AdamW's."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.99),
        weight_decay: float = 0,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        master_weights: str = "auto",
        moments: str = "fp32",
        seed: int = 0,
        on_nonfinite: str = "propagate",
        backend: str = "auto",
    ) -> None:
        super().__init__(params, _defaults(locals()))

    def rule(self, group: Mapping[str, Any]) -> Rule:
        """Return the Lion rule."""
        return RULES["lion"]


class SGD(Optimizer):
    """Stochastic gradient descent with optional momentum; a drop-in for ``torch.optim.SGD``.

    Weight decay goes through the gradient as in torch, unless ``decoupled_weight_decay=True``.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        master_weights: str = "auto",
        moments: str = "fp32",
        seed: int = 0,
        on_nonfinite: str = "propagate",
        backend: str = "auto",
    ) -> None:
        super().__init__(params, _defaults(locals()))

    def rule(self, group: Mapping[str, Any]) -> Rule:
        """Return the rule with a momentum buffer, or without where the group's momentum is 0."""
        return RULES["sgd_momentum" if float(group["momentum"]) > 0 else "sgd"]


def _defaults(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return a constructor's arguments without what is not a setting of a group."""
    hidden = ("self", "params", "__class__")
    return {name: value for name, value in arguments.items() if name not in hidden}

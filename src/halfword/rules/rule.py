"""What an update rule is made of."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Update = Callable[
    [Tensor, Tensor, tuple[Tensor, ...], tuple[float, ...]], tuple[Tensor, tuple[Tensor, ...]]
]


@dataclass(frozen=True)
class Slot:
    """One state of a rule, named as torch names it; non-negative ones quantize without sign."""

    name: str
    signed: bool


@dataclass(frozen=True)
class Rule:
    """An elementwise update on FP32 values, written once for all backends.

    Attributes:
        name: its name in ``RULES``.
        slots: the states it keeps for each parameter.
        scalars: ``(group, step) -> float64 values`` from a parameter group's hyper-parameters and
            the step counted from 1; each is rounded to FP32 once, when the work is made.
        update: ``(x, g, slots, scalars) -> (x, slots)`` in FP32; only ``+ - * /`` and the words of
            ``halfword.ops``, each rounded once.
        optional: slots that a parameter may lack, or hold unused, since its group may come to this
            rule or leave it in the middle of training; one that is made late starts at zero.
    """

    name: str
    slots: tuple[Slot, ...]
    scalars: Callable[[Mapping[str, Any], int], tuple[float, ...]]
    update: Update
    optional: tuple[Slot, ...] = ()

"""What every backend takes: the update of one parameter, described whole."""

from dataclasses import dataclass

from torch import Tensor

from halfword.rules import Rule
from halfword.stored import Stored


@dataclass(frozen=True)
class Work:
    """One parameter's way through one step.

    Attributes:
        rule: the update.
        scalars: the rule's scalars, each rounded to FP32.
        weight: the parameter and the planes of its master weight.
        slots: the rule's states, in its order.
        gradient: of the parameter's shape, BF16, FP16 or FP32, any strides; read, never written.
        gradient_scale: multiplies the gradient first, an FP32 value: the clip coefficient, negative
            where the objective is maximized.
    """

    rule: Rule
    scalars: tuple[float, ...]
    weight: Stored
    slots: tuple[Stored, ...]
    gradient: Tensor
    gradient_scale: float

"""What every backend takes: the update of one parameter, described whole."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from halfword.rules import Rule
from halfword.stored import Stored


@dataclass(slots=True)
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
        step: the parameter's own, from 1; selects the noise.
        start: row-major index of the first element in the tensor that the noise is a function of.
        kept: what a backend keeps of the parameter from one step to the next; empty again once a
            plane has become another tensor.
    """

    rule: Rule
    scalars: tuple[float, ...]
    weight: Stored
    slots: Sequence[Stored]
    gradient: Tensor
    gradient_scale: float
    step: int
    start: int = 0
    kept: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

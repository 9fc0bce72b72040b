"""What every backend takes: the update of one parameter, described whole."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from halfword.rules import Rule
from halfword.stored import Stored


@dataclass(frozen=True, slots=True)
class Clock:
    """Where a step that may be captured in a graph finds its numbers: on the device, as it runs.

    Attributes:
        step: the parameter's counter, an FP32 scalar; the step adds one.
        settings: of the parameter's group; tensors among them are float64 scalars.
        scale: multiplies the gradient, a number or a float64 scalar.
        finite: an int32 scalar, 0 where the step is to write nothing; None where it always writes.
    """

    step: Tensor
    settings: Mapping[str, Any]
    scale: float | Tensor
    finite: Tensor | None = None


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
        kept: what a backend keeps of the parameter from one step to the next; empty again once a
            plane has become another tensor.
        clock: takes the place of scalars, scale and step where the device computes them.
    """

    rule: Rule
    scalars: tuple[float, ...]
    weight: Stored
    slots: Sequence[Stored]
    gradient: Tensor
    gradient_scale: float
    step: int
    kept: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    clock: Clock | None = None

    @property
    def start(self) -> int:
        """Row-major index of the first element in the tensor that the noise is a function of."""
        return self.weight.place.start

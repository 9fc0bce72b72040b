"""The words a rule may use beyond ``+ - * /``: on FP32 tensors in its update, on floats in scalars.

Each rounds once, as IEEE 754 asks. A backend re-makes a rule with its own versions of these names,
so a rule refers to nothing else.
"""

import math
from typing import overload

import torch
from torch import Tensor


@overload
def sqrt(x: Tensor) -> Tensor: ...
@overload
def sqrt(x: float) -> float: ...
def sqrt(x: Tensor | float) -> Tensor | float:
    """Correctly rounded square root of an FP32 tensor, or of a float.

    ``torch.sqrt`` on a large CPU tensor is one ulp off for some values (a vector library). The
    detour over float64 rounds twice without harm: 53 bits are at least 2 * 24 + 2 (Figueroa, "When
    is double rounding innocuous?", 1995).

    >>> sqrt(torch.tensor([0.25, 2.0]))
    tensor([0.5000, 1.4142])
    """
    return x.double().sqrt().float() if isinstance(x, Tensor) else math.sqrt(x)


def power(base: float, exponent: int) -> float:
    """Power of a float by multiplications alone: libraries' ``pow`` differ in the last digit.

    The squares of ``base`` for the bits of ``exponent`` are multiplied, lowest bit first.

    >>> power(0.5, 10) == 0.5**10
    True
    """
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


def where(condition: Tensor | bool, yes: Tensor, no: Tensor) -> Tensor:
    """Select ``yes`` where ``condition`` holds, else ``no``; a bool selects a whole tensor.

    >>> where(2.0 > 1.0, torch.tensor(1.0), torch.tensor(2.0))
    tensor(1.)
    """
    if isinstance(condition, bool):
        return yes if condition else no
    return torch.where(condition, yes, no)


def sign(x: Tensor) -> Tensor:
    """Sign of ``x`` as -1, 0 or 1; NaN stays NaN (``torch.sign`` would make it 0).

    >>> sign(torch.tensor([-3.0, 0.0, float("nan")]))
    tensor([-1.,  0., nan])
    """
    return torch.where(x.isnan(), x, torch.sign(x))

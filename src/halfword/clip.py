"""Statistics over gradients: the global norm and the coefficient that clips to it, and finiteness.

Clipping never rewrites a gradient. The coefficient goes into the step, where the rule multiplies by
it in FP32, so that a BF16 gradient is not rounded a second time.
"""

import logging
import math
from collections.abc import Iterable

import torch
from torch import Tensor

from halfword.stored import tiles

logger = logging.getLogger(__name__)


def total_norm(gradients: Iterable[Tensor]) -> Tensor:
    """Return the 2-norm over all gradients, a 0-dim float64 tensor on the CPU.

    Squares are accumulated in float64, each element once.
    """
    squares = torch.zeros((), dtype=torch.float64)
    for gradient in gradients:
        for _, (tile,) in tiles([gradient]):
            squares += tile.double().square().sum().cpu()
    return squares.sqrt()


def clip_coefficient(norm: Tensor, max_norm: float) -> float:
    """Return the factor, at most 1, that clips gradients of ``norm``, as torch computes it.

    A NaN norm gives NaN: a diverged step must look diverged. ``max_norm=inf`` only measures.

    >>> clip_coefficient(torch.tensor(4.0), 1.0)
    0.24999993750001562
    """
    if not max_norm >= 0:
        raise ValueError(f"max_norm={max_norm}: must be at least 0")
    if math.isinf(max_norm):
        return 1.0
    coefficient = max_norm / (norm.item() + 1e-6)
    return coefficient if math.isnan(coefficient) else min(1.0, coefficient)


def must_skip(on_nonfinite: str, gradients: Iterable[tuple[str, Tensor]]) -> bool:
    """Decide over all gradients, each with a label, before anything is written, whether to skip.

    Raises:
        ValueError: one is not finite under the policy ``raise``.
    """
    if on_nonfinite == "propagate":
        return False
    found = next((label for label, gradient in gradients if not is_finite(gradient)), None)
    if found is not None and on_nonfinite == "raise":
        raise ValueError(
            f"{found} has a gradient that is not finite: lower lr, or use on_nonfinite='skip'"
        )
    if found is not None:
        logger.warning("step skipped: %s has a gradient that is not finite", found)
    return found is not None


def is_finite(gradient: Tensor) -> bool:
    """Whether no element is NaN or Inf."""
    return all(bool(tile.isfinite().all()) for _, (tile,) in tiles([gradient]))

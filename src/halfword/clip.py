"""Statistics over gradients: the global norm and the coefficient that clips to it, and finiteness.

Clipping never rewrites a gradient. The coefficient goes into the step, where the rule multiplies by
it in FP32, so that a BF16 gradient is not rounded a second time.
"""

import logging
import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from halfword.stored import tiles

logger = logging.getLogger(__name__)


def total_norm(gradients: Iterable[Tensor]) -> Tensor:
    """Return the 2-norm over all gradients, a 0-dim float64 tensor on the device of the first.

    Squares are accumulated in float64, each element once, without waiting for a device.
    """
    squares: dict[torch.device, Tensor] = {}
    for gradient in gradients:
        device = gradient.device
        total = squares.setdefault(device, torch.zeros((), dtype=torch.float64, device=device))
        for _, (tile,) in tiles([gradient]):
            total += tile.double().square().sum()
    first, *others = squares.values() or [torch.zeros((), dtype=torch.float64)]
    for other in others:
        first += other.to(first.device)
    return first.sqrt()


def clip_coefficient(norm: Tensor, max_norm: float) -> float | Tensor:
    """Return the factor, at most 1, that clips gradients of ``norm``, as torch computes it.

    A NaN norm gives NaN: a diverged step must look diverged. ``max_norm=inf`` only measures. The
    factor of a norm on another device than the CPU stays there.

    >>> clip_coefficient(torch.tensor(4.0), 1.0)
    0.24999993750001562
    """
    if not max_norm >= 0:
        raise ValueError(f"max_norm={max_norm}: must be at least 0")
    if math.isinf(max_norm):
        return 1.0
    if not norm.is_cpu:
        return (max_norm / (norm + 1e-6)).clamp(max=1.0)
    coefficient = max_norm / (norm.item() + 1e-6)
    return coefficient if math.isnan(coefficient) else min(1.0, coefficient)


def must_skip(on_nonfinite: str, gradients: Sequence[tuple[str, Tensor]]) -> bool:
    """Decide over all gradients, each with a label, before anything is written, whether to skip.

    Raises:
        ValueError: one is not finite under the policy ``raise``.
    """
    if on_nonfinite == "propagate":
        return False
    tensors = [gradient for _, gradient in gradients]
    if not all(tensor.is_cpu for tensor in tensors) and not some_not_finite(tensors):
        return False  # one wait for the device; to find one takes a wait for each tile
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


def some_not_finite(gradients: Iterable[Tensor]) -> Tensor:
    """Return whether an element is NaN or Inf, a bool scalar on the device of the first gradient.

    Nothing waits for a device.
    """
    largest = [torch.linalg.vector_norm(g, math.inf).float() for g in gradients if g.numel()]
    on_one_device = [norm.to(largest[0].device) for norm in largest] or [torch.zeros(())]
    return ~torch.stack(on_one_device).isfinite().all()

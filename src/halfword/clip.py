"""Statistics over gradients: the global norm and the coefficient that clips to it, and finiteness.

Clipping never rewrites a gradient. The coefficient goes into the step, where the rule multiplies by
it in FP32, so that a BF16 gradient is not rounded a second time.

Of sharded parameters every rank looks at its own part, and the ranks of the parameter's mesh agree.
"""

import logging
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from halfword.shards import groups_of, local
from halfword.stored import tiles

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

logger = logging.getLogger(__name__)


def total_norm(
    gradients: Iterable[Tensor],
    parameters: Iterable[Tensor] = (),
    process_group: "ProcessGroup | None" = None,
) -> Tensor:
    """Return the 2-norm over all gradients, a 0-dim float64 tensor on the device of the first.

    Squares are accumulated in float64, each element once, without waiting for a device: over the
    mesh dimensions that shard a gradient, not over those that replicate it.

    Args:
        gradients: those that there are.
        parameters: all that may have gradients, in the same order on every rank: ranks must agree
            on whom to ask, also where one of them has no gradient.
        process_group: ranks that hold other parameters than this one, whose squares count too.
    """
    squares: dict[tuple[torch.device, tuple[ProcessGroup, ...]], Tensor] = {}

    def squares_of(tensor: Tensor) -> Tensor:
        key = tensor.device, groups_of(tensor, sharded_only=True)
        if key not in squares:
            squares[key] = torch.zeros((), dtype=torch.float64, device=tensor.device)
        return squares[key]

    for parameter in parameters:
        squares_of(parameter)
    for gradient in gradients:
        own = squares_of(gradient)
        for _, (tile,) in tiles([local(gradient)]):
            own += tile.double().square().sum()
    totals = [over_ranks(own, "SUM", groups) for (_, groups), own in squares.items()]
    first, *others = totals or [torch.zeros((), dtype=torch.float64)]
    for other in others:
        first = first + other.to(first.device)
    return over_ranks(first, "SUM", [process_group] if process_group else []).sqrt()


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


def must_skip(
    on_nonfinite: str,
    gradients: Sequence[tuple[str, Tensor]],
    groups: Sequence["ProcessGroup"] = (),
) -> bool:
    """Decide over all gradients, before anything is written, whether to skip a step.

    Args:
        on_nonfinite: ``propagate``, ``skip`` or ``raise``.
        gradients: those that there are, each with the label of its parameter.
        groups: of ranks that decide alike.

    Raises:
        ValueError: one is not finite under the policy ``raise``.
    """
    if on_nonfinite == "propagate":
        return False
    tensors = [gradient for _, gradient in gradients]
    found = None
    # On a device one wait for all comes first; to find one takes a wait for each tile.
    if all(tensor.is_cpu for tensor in tensors) or some_not_finite(tensors):
        found = next((label for label, gradient in gradients if not is_finite(gradient)), None)
    if not over_ranks(torch.tensor(int(found is not None)), "MAX", groups):
        return False
    whose = found or "a parameter of another rank"
    if on_nonfinite == "raise":
        raise ValueError(
            f"{whose} has a gradient that is not finite: lower lr, or use on_nonfinite='skip'"
        )
    logger.warning("step skipped: %s has a gradient that is not finite", whose)
    return True


def is_finite(gradient: Tensor) -> bool:
    """Whether no element is NaN or Inf."""
    return all(bool(tile.isfinite().all()) for _, (tile,) in tiles([local(gradient)]))


def some_not_finite(gradients: Iterable[Tensor]) -> Tensor:
    """Return whether an element is NaN or Inf, a bool scalar on the device of the first gradient.

    Nothing waits for a device.
    """
    own = [part for part in map(local, gradients) if part.numel()]
    largest = [torch.linalg.vector_norm(part, math.inf).float() for part in own]
    on_one_device = [norm.to(largest[0].device) for norm in largest] or [torch.zeros(())]
    return ~torch.stack(on_one_device).isfinite().all()


def over_ranks(value: Tensor, operation: str, groups: Iterable["ProcessGroup"]) -> Tensor:
    """Return a scalar reduced over process groups in turn, on its device."""
    device = value.device
    for group in groups:
        from torch import distributed

        if f"{value.device.type}:" not in distributed.get_backend_config(group):
            value = value.to(torch.accelerator.current_accelerator() if value.is_cpu else "cpu")
        distributed.all_reduce(value, getattr(distributed.ReduceOp, operation), group)
    return value.to(device)


def deciding_groups(
    parameters: Iterable[Tensor], process_group: "ProcessGroup | None"
) -> list["ProcessGroup"]:
    """Return the groups of ranks that decide alike: of the parameters' meshes, and another one."""
    groups = [group for tensor in parameters for group in groups_of(tensor, sharded_only=False)]
    return list(dict.fromkeys([*groups, *([process_group] if process_group else [])]))

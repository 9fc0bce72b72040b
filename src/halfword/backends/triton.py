"""The Triton backend: one launch for many parameters, on any device that Triton compiles for.

A work that it cannot take (a tensor that is not plain and contiguous, a format without a piece in
``kernels/``) goes to the reference, which gives the same bits; a reason that a user may want to
know is logged once. Nothing here waits for the device.
"""

from collections.abc import Sequence

from torch import Tensor

from halfword.backends import reference
from halfword.backends.batches import Batches, obstacle
from halfword.backends.reference import say_once
from halfword.backends.triton_batch import Combination, Launch
from halfword.backends.triton_clock import ADDRESS, NUMBER, shape_of
from halfword.backends.triton_kernels import (
    ClockKernel,
    Kernels,
    clock_kernel,
    interprets,
    kernels,
    unavailable,
)
from halfword.backends.work import Clock, Work
from halfword.rules import Rule

__all__ = ["combination", "step", "unavailable"]


def step(works: Sequence[Work]) -> None:
    """Take every work through decode, rule and encode, those that share formats in one launch.

    Raises:
        ValueError: a work has a clock, which the reference cannot read, and must be left to it.
        RuntimeError: a graph captures a step that cannot be captured, or for the first time.
    """
    if not works:
        return
    batches: Batches[Launch] | None = works[0].kept.get("triton")
    if batches is None or not batches.fit(works):
        batches = works[0].kept["triton"] = Batches(works, combination, Launch)
    for launch in batches.batches:
        launch.run(works)
    reference.step([works[number] for number in batches.left])


def combination(work: Work) -> Combination | None:
    """Return what takes a work; None where the reference must run.

    Raises:
        ValueError: it must and cannot, since the work has a clock.
    """
    found = unavailable() or _kernels(work)
    if isinstance(found, Kernels):
        clock = None if work.clock is None else _clock(work.rule, work.clock)
        return Combination(found, clock, work.gradient.device)
    if work.clock is not None:
        raise ValueError(f"capturable=True: {found}; use capturable=False")
    return say_once(found)


def _kernels(work: Work) -> Kernels | str:
    """Return the kernels that take a work, or why there are none."""
    if work.gradient.is_cpu and not interprets():
        return "a parameter is on the CPU"
    if reason := obstacle(work):
        return reason
    formats = tuple(one.format for one in (work.weight, *work.slots))
    guarded = work.clock is not None and work.clock.finite is not None
    try:
        return kernels(work.rule, formats, work.gradient.dtype, guarded)
    except TypeError as error:
        return str(error)


def _clock(rule: Rule, clock: Clock) -> ClockKernel:
    scale = ADDRESS if isinstance(clock.scale, Tensor) else NUMBER
    try:
        return clock_kernel(rule, shape_of(clock.settings), scale, clock.finite is not None)
    except TypeError as error:
        raise ValueError(f"capturable=True: {error}; use capturable=False") from error

"""Steps that a graph can capture: the device counts them, computes their scalars, skips them.

Nothing here reads a number from the device.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from halfword.backends import Clock, Work
from halfword.clip import deciding_groups, must_skip, over_ranks, some_not_finite, total_norm
from halfword.member import Member
from halfword.members import Members
from halfword.settings import check_supported, device_settings

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Pending = Sequence[tuple[Member, Tensor]]


def is_captured(pending: Pending) -> bool:
    """Whether all members may be captured."""
    return bool(pending) and all(member.is_captured for member, _ in pending)


def norm_of(
    pending: Pending, parameters: Iterable[Tensor], process_group: "ProcessGroup | None"
) -> Tensor:
    """Return the 2-norm over all gradients: on the CPU, or on the device where all are captured."""
    norm = total_norm((gradient for _, gradient in pending), parameters, process_group)
    return norm if is_captured(pending) else norm.cpu()


def decide_skip(
    on_nonfinite: str,
    pending: Pending,
    members: Iterable[Member],
    process_group: "ProcessGroup | None",
) -> bool | Tensor:
    """Decide whether a step is skipped, see ``must_skip``; on the device where all are captured."""
    if on_nonfinite == "propagate":
        return False
    groups = deciding_groups((member.parameter for member in members), process_group)
    if on_nonfinite == "skip" and is_captured(pending):
        found = some_not_finite(gradient for _, gradient in pending)
        return over_ranks(found.int(), "MAX", groups).bool()
    gradients = [(member.label, gradient) for member, gradient in pending]
    return must_skip(on_nonfinite, gradients, groups)


def works_of(
    members: Members, pending: Pending, coefficient: float | Tensor, skipped: bool | Tensor
) -> dict[str, list[Work]]:
    """Describe the updates of members by backend, see ``Members.works``.

    Args:
        members: all of the optimizer's.
        pending: those that have gradients, with them.
        coefficient: multiplies every gradient, a number or a float64 scalar.
        skipped: where it is a tensor that turns out true, nothing is written.
    """
    captured = [pair for pair in pending if pair[0].is_captured]
    others = [pair for pair in pending if not pair[0].is_captured] if captured else pending
    works = members.works(others, float(coefficient)) if others else {}
    if captured:
        finite = (~skipped).int() if isinstance(skipped, Tensor) else None
        works["triton"] = works.get("triton", []) + _captured(captured, coefficient, finite)
    return works


def _captured(pending: Pending, coefficient: float | Tensor, finite: Tensor | None) -> list[Work]:
    of_groups: dict[int, tuple[dict[str, Any], float | Tensor]] = {}
    works = []
    for member, gradient in pending:
        group = member.group
        if id(group) not in of_groups:
            check_supported(group)  # it may have been changed since construction
            scale = -coefficient if group["maximize"] else coefficient
            of_groups[id(group)] = device_settings(group, gradient.device), scale
        work = member.work(gradient, 1.0, (), 0)
        work.clock = Clock(member.state["step"], *of_groups[id(group)], finite)
        works.append(work)
    return works

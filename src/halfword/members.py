"""The members of an optimizer, kept from step to step while nothing they are made of changes."""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any, Self

import torch
from torch import Tensor

from halfword.backends import Work
from halfword.formats import MOMENTS
from halfword.formats.block8 import BLOCK, SMALLEST
from halfword.loading import Plan, merge_groups
from halfword.member import Member, round_to_fp32
from halfword.rules import Rule
from halfword.settings import (
    check_backend,
    check_group,
    check_supported,
    moment_settings,
    numbers,
)

Groups = Sequence[Mapping[str, Any]]
States = Mapping[Tensor, dict[str, Any]]
RuleOf = Callable[[Mapping[str, Any]], Rule]

logger = logging.getLogger(__name__)

NAMES_IN_A_MESSAGE = 3
_REASONS = {
    "fp32": (logging.INFO, f"of one dimension or under {SMALLEST} elements"),
    "bf16-sr": (logging.WARNING, f"whose last dimension is no multiple of {BLOCK}"),
}


def make_members(
    groups: Groups, rule_of: RuleOf, states: States, position: int = 0
) -> Iterator[Member]:
    """Yield a member for each parameter of ``groups``, with its state where it has one.

    Args:
        groups: parameter groups.
        rule_of: gives a group's rule.
        states: by parameter.
        position: of the first parameter over all groups of the optimizer.
    """
    for group in groups:
        rule = rule_of(group)
        for index, parameter in enumerate(group["params"]):
            yield Member(group, index, position, rule, states.get(parameter, {}))
            position += 1


def make_states(members: Sequence[Member]) -> list[dict[str, Tensor]]:
    """Return the states of new members; their ``step`` scalars on the CPU share a storage."""
    counters = torch.zeros(len(members), dtype=torch.float32, device="cpu").unbind()
    states = [member.make_state() for member in members]
    for member, state, counter in zip(members, states, counters, strict=True):
        if not member.is_captured:
            state["step"] = counter
    return states


def report_exceptions(members: Sequence[Member]) -> None:
    """Log which parameters keep moments wider than their setting asks for, and why."""
    exceptions: dict[tuple[str, str], dict[str, None]] = defaultdict(dict)  # labels, each once
    for member in members:
        settings = moment_settings(member.group["moments"], member.rule)
        for setting, format in zip(settings, member.slot_formats, strict=True):
            if MOMENTS[setting].block > format.block:
                exceptions[setting, format.name][member.label] = None
    for (setting, name), labels in exceptions.items():
        level, reason = _REASONS[name]
        listed = ", ".join(list(labels)[:NAMES_IN_A_MESSAGE])
        more = ", ..." if len(labels) > NAMES_IN_A_MESSAGE else ""
        logger.log(
            level,
            "moments=%r: %d parameters %s take %s: %s%s",
            *(setting, len(labels), reason, name, listed, more),
        )


def plan_load(
    groups: Groups, rule_of: RuleOf, states: States, saved: Mapping[str, Any], convert: bool
) -> tuple[list[dict[str, Any]], list[Member], list[Plan]]:
    """Return new groups, members with states to fit them, and what is to be written into those.

    Args:
        groups: the optimizer's.
        rule_of: gives a group's rule.
        states: by parameter; those that fit are kept.
        saved: a state dict.
        convert: whether values may be rounded.

    Raises:
        ValueError: see ``Optimizer.load_state_dict``.
    """
    merged = merge_groups(groups, saved["param_groups"])
    for group in merged:
        check_group(numbers(group), rule_of(group))
    members = list(make_members(merged, rule_of, states))
    for member in members:
        if not member.state_fits():
            member.state = member.make_state()
    saved_ids = chain.from_iterable(group["params"] for group in saved["param_groups"])
    plans = [
        plan
        for member, saved_id in zip(members, saved_ids, strict=True)
        for plan in member.plan_load(saved["state"].get(saved_id, {}), convert)
    ]
    return merged, members, plans


class Members:
    """An optimizer's members as they were made last, and a picture of what they were made of.

    Users change groups, states and parameters between steps as they please, and no hook tells of
    it. Looking at it all in a few passes costs a microsecond a parameter; making members, thirty.
    """

    def __init__(self) -> None:
        self._members: list[Member] = []
        self._by_parameter: dict[Tensor, Member] = {}
        self._groups: Groups = []
        self._picture: tuple[list[object], list[object]] = [], []
        self._counters: _Counters | None = None

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members)

    def refreshed(self, groups: Groups, rule_of: RuleOf, states: States) -> Self:
        """Return the members of ``groups``: made anew if anything was changed."""
        self._groups = groups
        identical, equal = picture = _picture(groups, rule_of, states)
        before, equal_before = self._picture
        if (
            len(identical) != len(before)
            or not all(map(is_, identical, before))
            or equal != equal_before
        ):
            self._members = list(make_members(groups, rule_of, states))
            self._by_parameter = {member.parameter: member for member in self._members}
            self._picture = picture
            self._counters = _joined(self._members)
        return self

    @staticmethod
    def with_own_counters(states: Mapping[Any, Any]) -> dict[Any, Any]:
        """Return states whose ``step`` has its own storage, for pickle writes a storage whole."""
        return {
            key: {**state, "step": state["step"].clone()}
            if isinstance(state, dict) and isinstance(state.get("step"), Tensor)
            else state
            for key, state in states.items()
        }

    def find(self, parameter: Tensor) -> Member:
        """Return the member that holds a parameter.

        Raises:
            ValueError: none does.
        """
        if parameter not in self._by_parameter:
            shape = tuple(parameter.shape)
            raise ValueError(f"parameter of shape {shape}: not in this optimizer")
        return self._by_parameter[parameter]

    def ensure_states(self, states: dict[Tensor, dict[str, Any]], chosen: list[Member]) -> None:
        """Make or mend the states of members that have not been stepped yet, in ``states``.

        Raises:
            ValueError: see ``Member.ensure_state``.
        """
        new = [member for member in chosen if not member.is_ready]
        for member in new:
            member.ensure_state()
            states[member.parameter] = member.state
        if new:
            self._counters = _joined(self._members)

    def works(
        self, pending: Sequence[tuple[Member, Tensor]], clip_coefficient: float
    ) -> dict[str, list[Work]]:
        """Count the step of each member and describe its update, by backend.

        Args:
            pending: some of the members or all, in their order, each with its gradient.
            clip_coefficient: multiplies every gradient.
        """
        for changed in self._groups:
            check_backend(changed)  # before anything is counted
            check_supported(changed)
            numbers(changed)
        works: dict[str, list[Work]] = defaultdict(list)
        shared: dict[tuple[int, int], tuple[float, tuple[float, ...]]] = {}
        group: Mapping[str, Any] | None = None
        before = 0
        steps = self._count_steps([member for member, _ in pending])
        for (member, gradient), step in zip(pending, steps, strict=True):
            if member.group is not group or step != before:
                group, before = member.group, step
                if (id(group), step) not in shared:
                    scale = -clip_coefficient if group["maximize"] else clip_coefficient
                    shared[id(group), step] = round_to_fp32(scale), member.scalars(step)
                scale, scalars = shared[id(group), step]
                add = works[group["backend"]].append
            add(member.work(gradient, scale, scalars, step))
        return works

    def _count_steps(self, chosen: Sequence[Member]) -> list[int]:
        """Add one to the step of each member, and return what they are now."""
        counters = self._counters
        if counters is not None and len(chosen) == len(self._members) and counters.are_current():
            torch._foreach_add_(counters.joined, 1)
            return [int(number) for joined in counters.joined for number in joined.tolist()]
        steps = [member.state["step"] for member in chosen]
        for step in steps:
            step += 1
        return list(map(int, map(Tensor.item, steps)))


class _Counters:
    """``step`` states as vectors over what stands side by side in memory."""

    def __init__(self, steps: list[Tensor], joined: list[Tensor]) -> None:
        self.joined = joined
        self._steps = steps
        self._addresses = list(map(Tensor.data_ptr, steps))

    def are_current(self) -> bool:
        """Whether the states are where they were: ``.data`` changes a tensor under its name."""
        return list(map(Tensor.data_ptr, self._steps)) == self._addresses


def _picture(groups: Groups, rule_of: RuleOf, states: States) -> tuple[list[object], list[object]]:
    """Return all objects that members read, those to compare by identity and those by value."""
    parameters = list(chain.from_iterable(group["params"] for group in groups))
    settings = [
        (
            group,
            rule_of(group),
            *map(group.get, ("master_weights", "moments", "seed", "identities", "capturable")),
        )
        for group in groups
    ]
    identical = [
        *chain.from_iterable(settings),
        *parameters,
        *map(attrgetter("dtype"), parameters),
        *states.values(),
    ]
    own = [state for state in states.values() if isinstance(state, dict)]  # users may add others
    identical += chain.from_iterable(own)
    identical += chain.from_iterable(state.values() for state in own)
    identities = [list(group["identities"]) for group in groups]
    return identical, [*identities, *map(attrgetter("device"), parameters)]


def _joined(members: Sequence[Member]) -> _Counters | None:
    """Return the counters of members, or None if one is missing or not FP32."""
    steps: list[Tensor] = []
    runs: list[list[Tensor]] = []
    for member in members:
        step = member.state.get("step")
        if not isinstance(step, Tensor) or step.dtype != torch.float32:
            return None
        if runs and _stands_after(runs[-1][-1], step):
            runs[-1].append(step)
        else:
            runs.append([step])
        steps.append(step)
    return _Counters(steps, [run[0].as_strided((len(run),), (1,)) for run in runs])


def _stands_after(first: Tensor, second: Tensor) -> bool:
    return (
        first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
        and second.storage_offset() == first.storage_offset() + 1
    )

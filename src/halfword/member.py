"""One parameter as a member of its group: its formats, its state, its work in a step."""

import ctypes
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from halfword import noise
from halfword.backends import Work
from halfword.formats import Format
from halfword.loading import Plan, known_keys, plan_slot, plan_weight, saved_step
from halfword.rules import Rule
from halfword.settings import check_parameter, slot_formats, weight_format
from halfword.stored import (
    WEIGHT_KEYS,
    Stored,
    make_slot,
    make_weight,
    state_keys,
    weight_keys,
)


class Member:
    """A parameter in its group.

    Attributes:
        group: the parameter group it is in.
        parameter: the tensor that is optimized.
        state: its optimizer state, by key.
        label: what errors call it: its name, or its position over all groups.
        identity: the 64-bit number that its noise depends on.
        rule: the update of its group.
    """

    def __init__(
        self,
        group: Mapping[str, Any],
        index: int,
        position: int,
        rule: Rule,
        state: dict[str, Any],
    ) -> None:
        self.group = group
        self.parameter: Tensor = group["params"][index]
        self.state = state
        self.rule = rule
        self.identity: int = group["identities"][index]
        names = group.get("param_names")
        self.label = f"parameter {names[index]!r}" if names else f"parameter {position}"
        check_parameter(self.parameter, self.label)
        self.weight_format = weight_format(group["master_weights"], self.parameter, self.label)
        self.slot_formats = slot_formats(group["moments"], rule)
        self._seed: int = group["seed"]

    @property
    def step(self) -> int:
        """Updates that the parameter has had."""
        return int(self.state["step"])

    def state_fits(self) -> bool:
        """Whether the state holds just the planes of the formats chosen for the parameter."""
        expected = {"step", *weight_keys(self.weight_format)}
        for slot, format in zip(self.rule.slots, self.slot_formats, strict=True):
            expected.update(state_keys(format, slot.name))
        stale = (WEIGHT_KEYS & self.state.keys()) - expected
        return expected <= self.state.keys() and not stale

    def ensure_state(self) -> None:
        """Make a missing state, and follow a parameter that was moved, or cast before its use.

        Raises:
            ValueError: the state belongs to another dtype or another setting, and holds training.
        """
        if not self.state_fits():
            if self.state and self.step > 0:
                raise ValueError(
                    f"{self.label}: its dtype or formats changed after {self.step} steps; "
                    "make a new optimizer and load this one's state_dict"
                )
            self.state.clear()
            self.state.update(self.make_state())
        for key, plane in self.state.items():
            if key != "step" and plane.device != self.parameter.device:
                self.state[key] = plane.to(self.parameter.device)

    @torch.no_grad()
    def make_state(self) -> dict[str, Tensor]:
        """Return the state before the first step: the master weight is what the parameter shows."""
        state = {"step": torch.zeros((), dtype=torch.float32, device="cpu")}
        state |= make_weight(self.weight_format, self.parameter)
        for slot, format in zip(self.rule.slots, self.slot_formats, strict=True):
            state |= make_slot(format, slot.name, self.parameter)
        return state

    def weight(self, step: int = 0) -> Stored:
        """Return the weight's planes; ``step`` selects the noise that a write is rounded with."""
        planes = (
            self.parameter.detach(),
            *(self.state[key] for key in weight_keys(self.weight_format)),
        )
        return Stored(
            self.weight_format, planes, self._noise_key(self.weight_format, "weight", step)
        )

    def slots(self, step: int = 0) -> tuple[Stored, ...]:
        """Return the slots' planes, in the rule's order."""
        return tuple(
            Stored(
                format,
                tuple(self.state[key] for key in state_keys(format, slot.name)),
                self._noise_key(format, slot.name, step),
            )
            for slot, format in zip(self.rule.slots, self.slot_formats, strict=True)
        )

    def work(
        self, gradient: Tensor, gradient_scale: float, scalars: tuple[float, ...], step: int
    ) -> Work:
        """Describe the update of this parameter at ``step``, counted from 1."""
        if gradient.layout != torch.strided:
            raise ValueError(
                f"{self.label} has a sparse gradient: make it dense, nn.Embedding by sparse=False"
            )
        return Work(
            rule=self.rule,
            scalars=tuple(map(round_to_fp32, scalars)),
            weight=self.weight(step),
            slots=self.slots(step),
            gradient=gradient.detach(),
            gradient_scale=round_to_fp32(gradient_scale),
        )

    def state_entries(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield ``(component, key, tensor)`` of the state, for counting its memory."""
        for key, tensor in self.state.items():
            component = "scalars" if key == "step" else "moments"
            yield "master_weights" if key in WEIGHT_KEYS else component, key, tensor

    def plan_load(self, saved: Mapping[str, Any], convert: bool) -> list[Plan]:
        """Plan how the state is restored from a saved one of any format.

        Raises:
            ValueError: a key of no meaning here, a plane of another shape, or a conversion that
                would round without ``convert``.
        """
        unknown = saved.keys() - known_keys([slot.name for slot in self.rule.slots])
        if unknown:
            raise ValueError(
                f"{self.label}: saved state {min(unknown)!r} has no meaning for {self.rule.name}"
            )
        step = saved_step(saved, self.label)
        plans = [plan_weight(saved, self.weight(step), self.label, convert)]
        for slot, stored in zip(self.rule.slots, self.slots(step), strict=True):
            plans.append(plan_slot(saved, slot.name, stored, self.label, convert))
        plans.append(Plan(lambda: self.state["step"].fill_(step)))
        return plans

    def _noise_key(self, format: Format, state: str, step: int) -> tuple[int, int] | None:
        if not format.stochastic:
            return None
        return noise.key(self._seed, self.identity, state, step)


def round_to_fp32(value: float) -> float:
    """Round a float64 to the nearest FP32, once; beyond FP32's range it becomes Inf."""
    return ctypes.c_float(value).value

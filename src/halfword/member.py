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
from halfword.rules import Rule, Slot
from halfword.settings import (
    check_parameter,
    dtype_name,
    numbers,
    slot_formats,
    weight_format,
)
from halfword.shards import aligned, check_blocks, is_sharded, local, part_of, place_of
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
        is_captured: whether a graph may capture its steps: their numbers are on the device then.
        is_sharded: whether the parameter is a DTensor.
        place: where this rank's part of the parameter lies in the whole.
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
        self.is_sharded = is_sharded(self.parameter)
        self.place = place_of(self.parameter, self.label)
        self.weight_format = weight_format(group["master_weights"], self.parameter, self.label)
        self.slot_formats = slot_formats(group["moments"], rule, self.parameter.shape)
        self.is_captured = bool(group.get("capturable"))
        for format in self.slot_formats:
            check_blocks(self.parameter, format.block, self.label)
        self._stored: tuple[Stored, tuple[Stored, ...]] | None = None
        self._kept: dict[str, Any] = {}

    @property
    def step(self) -> int:
        """Updates that the parameter has had."""
        return int(self.state["step"].item())

    def state_fits(self) -> bool:
        """Whether the state holds the planes of the formats chosen for the parameter."""
        return not self._missing() and not self._stale()

    @property
    def is_ready(self) -> bool:
        """Whether ``ensure_state`` was called."""
        return self._stored is not None

    def ensure_state(self) -> None:
        """Make a missing state, and follow a parameter that was moved, or cast before its use.

        Raises:
            ValueError: the state belongs to another dtype or another setting, and holds training.
        """
        if not self.state_fits():
            late = self.rule.slots == self.rule.optional
            if late and not self._stale() and self._missing() <= self._slot_keys(self.rule.slots):
                self.state.update(self._make_slots(self.rule.slots))
            elif self.state and self.step > 0:
                raise ValueError(
                    f"{self.label}: its dtype or formats changed after {self.step} steps; "
                    "make a new optimizer and load this one's state_dict"
                )
            else:
                self.state.clear()
                self.state.update(self.make_state())
        for key, plane in self.state.items():
            if key != "step" or self.is_captured:
                self.state[key] = plane.to(self.parameter.device)
        self._stored = self.weight(), self.slots()

    @torch.no_grad()
    def make_state(self) -> dict[str, Tensor]:
        """Return the state before the first step: the master weight is what the parameter shows."""
        device = self.parameter.device if self.is_captured else "cpu"
        state = {"step": torch.zeros((), dtype=torch.float32, device=device)}
        state |= make_weight(self.weight_format, self.parameter)
        return state | self._make_slots(self.rule.slots)

    def usable(self, gradient: Tensor) -> Tensor:
        """Return a gradient laid out as the parameter.

        Raises:
            ValueError: it is sparse or not real: no backend takes it.
        """
        if gradient.layout is not torch.strided:
            raise ValueError(
                f"{self.label} has a sparse gradient: make it dense, nn.Embedding by sparse=False"
            )
        if not gradient.dtype.is_floating_point:
            dtype = dtype_name(gradient.dtype)
            raise ValueError(f"{self.label} has a gradient of dtype {dtype}: it must be real")
        return aligned(gradient, self.parameter) if self.is_sharded else gradient

    def weight(self) -> Stored:
        """Return the weight's planes."""
        keys = weight_keys(self.weight_format)
        return self._in_planes(self.weight_format, "weight", self.parameter, keys)

    def slots(self) -> tuple[Stored, ...]:
        """Return the slots' planes, in the rule's order."""
        return tuple(
            self._in_planes(format, slot.name, None, state_keys(format, slot.name))
            for slot, format in zip(self.rule.slots, self.slot_formats, strict=True)
        )

    def scalars(self, step: int) -> tuple[float, ...]:
        """Return the rule's scalars at ``step``, each rounded once; the same for its group."""
        return tuple(map(round_to_fp32, self.rule.scalars(numbers(self.group), step)))

    def work(self, gradient: Tensor, scale: float, scalars: tuple[float, ...], step: int) -> Work:
        """Describe the update of this parameter at ``step``, counted from 1.

        Args:
            gradient: of the parameter's shape.
            scale: multiplies the gradient, an FP32 value.
            scalars: the rule's, FP32 values.
            step: the parameter's own.
        """
        if self.is_sharded or self._stored is None:  # FSDP2 may exchange what is behind it
            weight, slots, gradient = self.weight(), self.slots(), local(gradient)
            return Work(self.rule, scalars, weight, slots, gradient, scale, step)
        weight, slots = self._stored
        return Work(self.rule, scalars, weight, slots, gradient, scale, step, self._kept)

    def entries(self, gradient: Tensor | None) -> Iterator[tuple[str, str, Tensor]]:
        """Yield ``(component, plane, tensor)`` of all that is held, for counting its memory."""
        yield "weights", dtype_name(self.parameter.dtype), local(self.parameter)
        for key, tensor in self.state.items():
            component = "scalars" if key == "step" else "moments"
            yield "master_weights" if key in WEIGHT_KEYS else component, key, local(tensor)
        if gradient is not None:
            yield "gradients", dtype_name(gradient.dtype), local(gradient)

    def plan_load(self, saved: Mapping[str, Any], convert: bool) -> list[Plan]:
        """Plan how the state is restored from a saved one of any format.

        Raises:
            ValueError: a key of no meaning here, a plane of another shape, or a conversion that
                would round without ``convert``.
        """
        optional = {slot.name for slot in self.rule.optional}
        names = {slot.name for slot in self.rule.slots} | optional
        own = known_keys([])
        unknown = saved.keys() - known_keys(sorted(names))
        if unknown:
            raise ValueError(
                f"{self.label}: saved state {min(unknown)!r} has no meaning for {self.rule.name}"
            )
        saved = {key: self._own_part(key, value) for key, value in saved.items()}
        step = saved_step(saved, self.label)
        plans = [plan_weight(saved, self.weight(), step, self.label, convert)]
        for slot, stored in zip(self.rule.slots, self.slots(), strict=True):
            may_lack = slot.name in optional
            plans.append(plan_slot(saved, slot.name, stored, step, self.label, convert, may_lack))
        unused = optional - {slot.name for slot in self.rule.slots}
        kept = {key: saved[key].clone() for key in saved.keys() & known_keys(sorted(unused)) - own}
        plans.append(Plan(lambda: self.state.update(kept)))
        plans.append(Plan(lambda: self.state["step"].fill_(step)))
        return plans

    def _own_part(self, key: str, value: Any) -> Any:
        """Return what belongs to this rank of a saved state."""
        if key == "step" or not isinstance(value, Tensor):
            return value
        whole = self.parameter.shape
        if is_sharded(self.parameter) and value.shape[:-1] != whole[:-1]:
            raise ValueError(
                f"{self.label}: saved {key} has shape {tuple(value.shape)}, must be {tuple(whole)}"
            )
        return part_of(value, self.parameter)

    def _make_slots(self, slots: tuple[Slot, ...]) -> dict[str, Tensor]:
        state: dict[str, Tensor] = {}
        for slot, format in zip(slots, self.slot_formats, strict=True):
            state |= make_slot(format, slot.name, self.parameter)
        return state

    def _missing(self) -> set[str]:
        expected = {"step", *weight_keys(self.weight_format), *self._slot_keys(self.rule.slots)}
        return expected - self.state.keys()

    def _stale(self) -> set[str]:
        """Return the keys of another weight format than the parameter's."""
        return (WEIGHT_KEYS & self.state.keys()) - set(weight_keys(self.weight_format))

    def _slot_keys(self, slots: tuple[Slot, ...]) -> set[str]:
        chosen = zip(slots, self.slot_formats, strict=True)
        return {key for slot, format in chosen for key in state_keys(format, slot.name)}

    def _in_planes(
        self, format: Format, state: str, parameter: Tensor | None, keys: list[str]
    ) -> Stored:
        first = () if parameter is None else (local(parameter),)
        planes = (*first, *(local(self.state[key]) for key in keys))
        stream = noise.stream(self.group["seed"], self.identity, state)
        return Stored(format, planes, stream, self.place)


def round_to_fp32(value: float) -> float:
    """Round a float64 to the nearest FP32, once; beyond FP32's range it becomes Inf."""
    return ctypes.c_float(value).value

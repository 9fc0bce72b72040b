"""Reading saved optimizer state, in whatever format it was saved, into the planes that exist here.

Nothing is cast by value between formats: equal planes are copied as they are; others go through
FP32, and only where the target holds every value of the source, unless the caller asked to round.
(The stock ``Optimizer.load_state_dict`` casts every floating state to the parameter's dtype,
pytorch#43706.)
"""

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from halfword.formats import FORMATS, Format, Plane
from halfword.formats.rounding import nearest_away
from halfword.settings import RECEIVER_KEYS, dtype_name, own_lr
from halfword.stored import (
    Stored,
    adopt,
    plane_shape,
    state_keys,
    transcode,
    weight_keys,
    zero,
)

# Significant bits of what a torch.optim state of a dtype can hold, under a key that means FP32
# here.
_PRECISIONS = {
    torch.float32: ("fp32", 24),
    torch.float16: ("fp16", 11),
    torch.bfloat16: ("bf16", 8),
    torch.float64: ("float64", 53),
}


@dataclass(frozen=True)
class Plan:
    """One checked transfer; ``write`` cannot fail halfway on anything that a check could have seen.

    Attributes:
        write: does it.
        rounded: what it rounds, such as ``exp_avg: fp32 to bf16``; None where it is exact.
    """

    write: Callable[[], None]
    rounded: str | None = None


def plan_weight(
    saved: Mapping[str, Any], target: Stored, step: int, label: str, convert: bool
) -> Plan:
    """Plan how the master weight of a parameter is restored from its state saved at ``step``.

    The parameter itself must hold its weights already where the formats differ: a remainder means
    nothing without the weight that it belongs to.

    Raises:
        ValueError: a plane of another shape, or a conversion that would round and was not asked
            for.
    """
    parameter = target.planes[0]
    keys = weight_keys(target.format)
    found = [name for name in ("remainder", "remainder8", "master_weight") if name in saved]
    if found == keys:
        return _copy(saved, keys, target.planes[1:], label)
    source = _saved_weight(saved, found, parameter, label)
    if source is None:
        return Plan(lambda: adopt(target))
    return _convert(source, target, step, "master weight", label, convert)


def plan_slot(
    saved: Mapping[str, Any],
    slot: str,
    target: Stored,
    step: int,
    label: str,
    convert: bool,
    may_lack: bool = False,
) -> Plan:
    """Plan how one slot is restored; a new parameter's, which was not saved, becomes zero.

    Raises:
        ValueError: a plane of another shape, a slot that a trained parameter lacks although it may
            not, or a conversion that would round and was not asked for.
    """
    keys = state_keys(target.format, slot)
    if all(
        isinstance(saved.get(key), Tensor) and saved[key].dtype == plane.dtype
        for key, plane in zip(keys, target.planes, strict=True)
    ):
        return _copy(saved, keys, target.planes, label)
    source = _saved_slot(saved, slot, target.planes[0], label)
    if source is None:
        if not may_lack and step > 0:
            raise ValueError(f"{label}: the saved state has no {slot}; another rule made it")
        return Plan(lambda: zero(target))
    return _convert(source, target, step, slot, label, convert)


def known_keys(slots: list[str]) -> set[str]:
    """Return every state key that loading understands for a rule with these slots."""
    weights = {key for format in FORMATS.values() for key in weight_keys(format)}
    states = {
        key for slot in slots for format in FORMATS.values() for key in state_keys(format, slot)
    }
    return {"step"} | weights | states


def merge_groups(
    groups: Sequence[Mapping[str, Any]], saved: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return groups with the saved hyper-parameters and this optimizer's formats and choices."""
    if len(groups) != len(saved):
        raise ValueError(
            f"saved state has {len(saved)} parameter groups, this optimizer {len(groups)}"
        )
    merged = []
    for number, (group, source) in enumerate(zip(groups, saved, strict=True)):
        if len(group["params"]) != len(source["params"]):
            raise ValueError(
                f"group {number} has {len(source['params'])} saved parameters, "
                f"{len(group['params'])} here"
            )
        kept = {key: deepcopy(value) for key, value in source.items() if key not in RECEIVER_KEYS}
        by_name = dict(zip(kept.get("param_names", ()), kept.get("identities", ()), strict=False))
        names = group.get("param_names", ())
        if names and by_name.keys() >= set(names):
            # A loader that matches by name, as DCP does, leaves these lists in the saved order.
            kept |= {"param_names": names, "identities": [by_name[name] for name in names]}
        if len(kept.get("identities", group["params"])) != len(group["params"]):
            raise ValueError(
                f"group {number}: its saved identities are not those of its parameters"
            )
        joined = {**group, **kept}
        merged.append({**joined, "lr": own_lr(joined)})
    return merged


def warn_of_rounding(plans: list[Plan]) -> None:
    """Warn once of all that a load rounded."""
    rounded = Counter(plan.rounded for plan in plans if plan.rounded is not None)
    if rounded:
        listed = ", ".join(
            f"{what} ({count} parameters)" for what, count in sorted(rounded.items())
        )
        warnings.warn(f"load_state_dict rounded {listed}", stacklevel=3)


def saved_step(saved: Mapping[str, Any], label: str) -> int:
    """Return the saved step as an integer; states that ``torch.optim.SGD`` saved have none.

    A step kept in BF16 stops counting at 256 (pytorch/ao#4915); what it lost cannot be had back.
    """
    step = saved.get("step")
    if step is None:
        return int(any(isinstance(value, Tensor) for value in saved.values()))
    if isinstance(step, Tensor) and step.dtype in (torch.bfloat16, torch.float16):
        warnings.warn(
            f"{label}: its saved step {step.item():g} is {step.dtype}, which stops counting at "
            f"{256 if step.dtype == torch.bfloat16 else 2048}; bias correction may be off",
            stacklevel=2,
        )
    return int(step)


def _copy(
    saved: Mapping[str, Any], keys: list[str], planes: tuple[Tensor, ...], label: str
) -> Plan:
    sources = [
        _shaped(saved[key], plane, key, label) for key, plane in zip(keys, planes, strict=True)
    ]

    def write() -> None:
        for source, plane in zip(sources, planes, strict=True):
            plane.copy_(source)

    for source, plane, key in zip(sources, planes, keys, strict=True):
        if source.dtype != plane.dtype:
            raise _wrong_dtype(source, plane.dtype, key, label)
    return Plan(write)


def _convert(
    source: Stored, target: Stored, step: int, what: str, label: str, convert: bool
) -> Plan:
    rounded = None
    if not target.format.holds(source.format):
        rounded = f"{what}: {source.format.name} to {target.format.name}"
        if not convert:
            raise ValueError(
                f"{label}: {rounded} would round; make the optimizer with the saved format, "
                "or call load_state_dict(state_dict, convert=True)"
            )
    return Plan(lambda: transcode(source, target, step), rounded)


def _saved_weight(
    saved: Mapping[str, Any], found: list[str], parameter: Tensor, label: str
) -> Stored | None:
    """Return the saved master weight, or None where the weight was its own master."""
    if not found:
        return None
    if len(found) > 1:
        raise ValueError(f"{label}: the saved state holds both {found[0]} and {found[1]}")
    format = next(f for f in FORMATS.values() if weight_keys(f) == found)
    weight = parameter.detach()
    if format.name in ("split", "split24"):
        if weight.dtype == torch.float16:
            raise ValueError(f"{label}: a {found[0]} belongs to a BF16 weight, this one is FP16")
        # An FP32 parameter loaded from BF16 weights, or from the masters, rounds to the BF16
        # weight.
        weight = weight if weight.dtype == torch.bfloat16 else nearest_away(weight.float())
    elif weight.dtype == torch.float16:
        format = FORMATS["fp16+fp32"]
    elif weight.dtype == torch.float32:
        weight = nearest_away(weight)
    plane = _shaped(saved[found[0]], weight, found[0], label)
    if plane.dtype != format.planes[1].dtype:
        raise _wrong_dtype(plane, format.planes[1].dtype, found[0], label)
    return Stored(format, (weight, plane))


def _saved_slot(saved: Mapping[str, Any], slot: str, like: Tensor, label: str) -> Stored | None:
    for format in FORMATS.values():
        keys = state_keys(format, slot)
        if not all(isinstance(saved.get(key), Tensor) for key in keys):
            continue
        if format.block > 1 and saved[keys[0]].dtype != format.planes[0].dtype:
            continue  # a signed moment's codes differ from another's by their dtype
        planes = tuple(
            _shaped(saved[key], like, key, label, plane)
            for key, plane in zip(keys, format.planes, strict=True)
        )
        if format.block > 1 and planes[1].dtype != format.planes[1].dtype:
            raise _wrong_dtype(planes[1], format.planes[1].dtype, keys[1], label)
        if keys == [slot]:
            format = _plain(planes[0], slot, label)
        return Stored(format, planes)
    return None


def _plain(tensor: Tensor, key: str, label: str) -> Format:
    """Return the FP32 format with the precision of a tensor that ``torch.optim`` saved."""
    if tensor.dtype not in _PRECISIONS:
        raise ValueError(f"{label}: saved {key} is {tensor.dtype}, must be floating point")
    name, precision = _PRECISIONS[tensor.dtype]
    return replace(FORMATS["fp32"], name=name, precision=precision)


def _wrong_dtype(tensor: Tensor, expected: torch.dtype, key: str, label: str) -> ValueError:
    found = dtype_name(tensor.dtype)
    return ValueError(f"{label}: saved {key} is {found}, must be {dtype_name(expected)}")


def _shaped(tensor: Any, like: Tensor, key: str, label: str, plane: Plane | None = None) -> Tensor:
    """Return a saved tensor on the device of ``like``, or raise ValueError where shapes differ.

    With ``plane`` it must have the shape of that plane of ``like``, else that of ``like``.
    """
    expected = like.shape if plane is None else plane_shape(plane, like)
    if not isinstance(tensor, Tensor) or tensor.shape != expected:
        shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
        raise ValueError(f"{label}: saved {key} has shape {shape}, must be {tuple(expected)}")
    return tensor.detach().to(like.device)

"""Checks of a parameter group's settings, and the formats they choose.

Every message names the option, its value and the fix; tests pin the wording.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from halfword.backends import BACKENDS, triton
from halfword.formats import MASTER_WEIGHTS, MOMENTS, Format, moment_format
from halfword.rules import Rule

ON_NONFINITE = ("propagate", "skip", "raise")

RECEIVER_KEYS = (
    "params",
    "master_weights",
    "moments",
    "backend",
    "on_nonfinite",
    "foreach",
    "fused",
    "capturable",
    "differentiable",
)
"""Group entries that say how an optimizer works here, not what was trained: loading keeps them."""


def numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's settings with every tensor among them read as a Python float.

    Raises:
        ValueError: a tensor of more than one element.
    """
    values = {name: value for name, value in group.items() if name != "params"}
    for name, value in values.items():
        if isinstance(value, Tensor):
            if value.numel() != 1:
                shape = tuple(value.shape)
                raise ValueError(f"{name} has shape {shape}: a tensor must hold one element")
            values[name] = float(value)
    if "betas" in values:
        values["betas"] = tuple(float(beta) for beta in values["betas"])
    return values


def own_lr(group: Mapping[str, Any]) -> Any:
    """Return a group's learning rate, a tensor as one of its own, where its steps read it.

    Schedulers write into a tensor: groups must not share one, nor round what is written.
    """
    lr = group["lr"]
    if not isinstance(lr, Tensor):
        return lr
    captured = group.get("capturable")
    device = group["params"][0].device if captured else lr.device
    wide = captured or lr.dtype == torch.float64
    return lr.detach().to(device, torch.float64 if wide else torch.float32, copy=True)


def device_settings(group: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Return a group's flags and numbers for steps that read a learning rate on ``device``.

    Raises:
        ValueError: a tensor of more than one element, or a learning rate that cannot be read there.
    """
    lr = group["lr"]
    if isinstance(lr, Tensor) and (lr.device != device or lr.dtype != torch.float64):
        raise ValueError(
            f"lr is a {dtype_name(lr.dtype)} tensor on {lr.device}, capturable=True: it must be "
            f"float64 on {device}, the device of all parameters of its group"
        )
    read = numbers({**group, "lr": 0.0 if isinstance(lr, Tensor) else lr})
    plain = {name: value for name, value in read.items() if not isinstance(value, list)}
    return plain | {"lr": lr}


def check_group(group: Mapping[str, Any], rule: Rule) -> None:
    """Raise ValueError unless every setting of a parameter group is valid and can be honoured."""
    for name in ("lr", "eps", "weight_decay", "momentum"):
        if name in group:
            _check_range(name, group[name], 0.0, math.inf)
    for index, beta in enumerate(group.get("betas", ())):
        _check_range(f"betas[{index}]", beta, 0.0, 1.0)
    if "dampening" in group and not math.isfinite(group["dampening"]):
        raise ValueError(f"dampening={group['dampening']}: must be finite")
    if group.get("nesterov") and (group["momentum"] <= 0 or group["dampening"] != 0):
        raise ValueError("nesterov=True: needs momentum > 0 and dampening=0")
    if "betas" in group and len(group["betas"]) != 2:
        raise ValueError(f"betas={group['betas']!r}: must be two numbers")
    if not isinstance(group["seed"], int):
        raise ValueError(f"seed={group['seed']!r}: must be an integer")
    check_supported(group)
    _check_choice("on_nonfinite", group["on_nonfinite"], ON_NONFINITE)
    check_backend(group)
    _check_choice("master_weights", group["master_weights"], MASTER_WEIGHTS[torch.bfloat16])
    moment_settings(group["moments"], rule)


def check_parameter(parameter: Tensor, label: str) -> None:
    """Raise ValueError unless halfword can optimize ``parameter``."""
    if parameter.is_meta:
        raise ValueError(
            f"{label} is on the meta device: materialize the model before making the optimizer"
        )
    if parameter.layout != torch.strided:
        raise ValueError(
            f"{label} has layout {parameter.layout}: only dense parameters are supported"
        )
    if parameter.dtype not in MASTER_WEIGHTS:
        raise ValueError(
            f"{label} has dtype {dtype_name(parameter.dtype)}: use float32, bfloat16 or float16"
        )


def weight_format(setting: str, parameter: Tensor, label: str) -> Format:
    """Return the format that ``master_weights=setting`` means here, or raise ValueError."""
    formats = MASTER_WEIGHTS[parameter.dtype]
    if setting not in formats:
        raise ValueError(
            f"master_weights={setting!r}: {label} is {dtype_name(parameter.dtype)}, which takes "
            + " or ".join(repr(name) for name in formats)
        )
    return formats[setting]


def slot_formats(
    setting: str | tuple[str, ...], rule: Rule, shape: torch.Size
) -> tuple[Format, ...]:
    """Return the formats that ``moments=setting`` means for a parameter's slots, or raise.

    Args:
        setting: one for all slots, or one for each.
        rule: has the slots.
        shape: the parameter's, global.

    Raises:
        ValueError: a setting of no meaning, or not as many as slots.
    """
    chosen = zip(moment_settings(setting, rule), rule.slots, strict=True)
    return tuple(moment_format(name, slot.signed, shape) for name, slot in chosen)


def moment_settings(setting: str | tuple[str, ...], rule: Rule) -> tuple[str, ...]:
    """Return ``moments=setting`` as one name for each slot of a rule, or raise ValueError."""
    if not isinstance(setting, tuple | list):
        _check_choice("moments", setting, MOMENTS)
        setting = (setting,) * len(rule.slots)
    names = tuple(setting)
    for name in names:
        _check_choice("moments", name, MOMENTS)
    if len(names) != len(rule.slots):
        slots = ", ".join(slot.name for slot in rule.slots) or "none"
        raise ValueError(f"moments={setting!r}: {rule.name} keeps {len(rule.slots)} ({slots})")
    return names


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name without its module: ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def check_backend(group: Mapping[str, Any]) -> None:
    """Raise ValueError where a group asks for a backend that there is not."""
    _check_choice("backend", group["backend"], ("auto", *BACKENDS))


def check_supported(group: Mapping[str, Any]) -> None:
    """Raise ValueError where a group asks for what torch has and halfword does not."""
    if group.get("amsgrad"):
        raise ValueError("amsgrad=True: not supported; AdamW and Adam keep two moments")
    if group.get("differentiable"):
        raise ValueError("differentiable=True: not supported; use torch.optim for it")
    if group.get("capturable"):
        _check_capturable(group)
    if group.get("foreach") and group.get("fused"):
        raise ValueError("foreach=True, fused=True: at most one of the two may be True")


def _check_capturable(group: Mapping[str, Any]) -> None:
    if group["backend"] not in ("auto", "triton"):
        raise ValueError(
            f"capturable=True, backend={group['backend']!r}: use 'auto' or 'triton', which can"
        )
    if group["on_nonfinite"] == "raise":
        raise ValueError("on_nonfinite='raise', capturable=True: a graph cannot raise; use 'skip'")
    if reason := triton.unavailable():
        raise ValueError(f"capturable=True: {reason}")


def _check_range(name: str, value: float, low: float, below: float) -> None:
    if not low <= value < below:
        limit = "finite" if math.isinf(below) else f"below {below:g}"
        raise ValueError(f"{name}={value}: must be at least {low:g} and {limit}")


def _check_choice(name: str, value: Any, choices: Any) -> None:
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name}={value!r}: use one of " + ", ".join(map(repr, choices)))

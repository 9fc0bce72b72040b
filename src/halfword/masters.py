"""A model in full precision: its state dict with every weight as its FP32 master."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from halfword.optimizer import Optimizer


def fp32_state_dict(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return ``model.state_dict()`` with every optimized weight replaced by its FP32 master.

    Buffers, extra states, and weights that ``optimizer`` does not hold stay as they are, detached.
    Tied weights share one tensor, as in the model.
    """
    masters: dict[Tensor, Tensor] = {}
    held = optimizer.parameters()
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    for name, value in state.items():
        if not isinstance(value, Tensor):  # a module's extra state
            continue
        if value in held and value not in masters:
            masters[value] = optimizer.master_weight(value)
        state[name] = masters.get(value, value.detach())
    return state


@torch.no_grad()
def load_fp32_state_dict(
    model: nn.Module, optimizer: Optimizer, state_dict: Mapping[str, Any]
) -> None:
    """Write a state dict into a model, each optimized weight together with its master, in FP32.

    The values become the master weights exactly, where their format holds FP32.

    Raises:
        ValueError: names or shapes that differ from the model's; nothing is written then.
    """
    targets = model.state_dict(keep_vars=True)
    _check_names(targets, state_dict)
    held = optimizer.parameters()
    for name, target in targets.items():
        if not isinstance(target, Tensor):
            model.load_state_dict({name: state_dict[name]}, strict=False)
        elif target in held:
            optimizer.set_master_weight(target, state_dict[name])
        else:
            target.copy_(state_dict[name])


def _check_names(targets: Mapping[str, Any], state_dict: Mapping[str, Any]) -> None:
    for name in targets.keys() ^ state_dict.keys():
        where = "missing in the state dict" if name in targets else "not a name of the model"
        raise ValueError(f"{name}: {where}")
    for name, target in targets.items():
        if isinstance(target, Tensor) and target.shape != state_dict[name].shape:
            raise ValueError(
                f"{name}: shape {tuple(state_dict[name].shape)}, must be {tuple(target.shape)}"
            )

"""What a checkpoint holds: a model and its optimizer as flat tensors and JSON, and back.

Tensors are called ``model.{name}`` and ``optimizer.{name}.{state key}``, whatever the order of
groups and parameters, so that an optimizer built another way finds its own. ``flatten`` and
``restore`` are each other's inverse.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from halfword.optimizer import Optimizer
from halfword.shards import empty
from halfword.stored import WEIGHT_KEYS


def flatten(model: nn.Module, optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return every tensor of a model and its optimizer, by name, and their settings as JSON values.

    Tensors are not copied, and a tied one comes once.

    Raises:
        ValueError: the optimizer holds a parameter that the model does not.
    """
    tensors: dict[str, Tensor] = {}
    ties: dict[str, str] = {}
    names: dict[Tensor, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if tensor in names:
            ties[name] = names[tensor]
        else:
            names[tensor] = name
            tensors[f"model.{name}"] = tensor.detach()
    groups = []
    for group in optimizer.param_groups:
        members = [_name(names, parameter) for parameter in group["params"]]
        for name, parameter in zip(members, group["params"], strict=True):
            for key, value in optimizer.state[parameter].items():
                tensors[f"optimizer.{name}.{key}"] = value
        settings = {key: _to_json(value) for key, value in group.items() if key != "params"}
        groups.append(settings | {"params": members})
    return tensors, {"ties": ties, "param_groups": groups}


def restore(
    model: nn.Module,
    optimizer: Optimizer,
    tensors: Mapping[str, Tensor],
    settings: Mapping[str, Any],
    convert: bool = False,
) -> None:
    """Write what ``flatten`` returned into a model and an optimizer, the weights first.

    Args:
        model: has the same parameters and buffers, by name.
        optimizer: has the same groups; its formats may differ where that is exact.
        tensors: by the names that ``flatten`` gives.
        settings: the JSON values that ``flatten`` gives.
        convert: passed on to ``Optimizer.load_state_dict``.

    Raises:
        ValueError: names, shapes, groups or formats that do not fit.
    """
    weights = {
        name.removeprefix("model."): tensor
        for name, tensor in tensors.items()
        if name.startswith("model.")
    }
    weights |= {alias: weights[name] for alias, name in settings["ties"].items()}
    state_dict = _optimizer_state(model, optimizer, tensors, settings["param_groups"])
    _check_weights(model, weights)
    model.load_state_dict(weights)
    optimizer.load_state_dict(state_dict, convert=convert)


def targets(model: nn.Module) -> Callable[[str, torch.Size, torch.dtype], Tensor]:
    """Return what ``read`` makes tensors with: each laid out as the parameter that it belongs to.

    So a rank reads its own part alone, whatever the ranks were that saved.
    """
    own = {name: t for name, t in model.state_dict(keep_vars=True).items() if isinstance(t, Tensor)}

    def make(name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        kind, _, rest = name.partition(".")
        return empty(shape, dtype, own.get(rest if kind == "model" else rest.rpartition(".")[0]))

    return make


def component_of(name: str) -> tuple[str, str]:
    """Return the component and plane that a tensor of ``flatten`` belongs to, as in ``Memory``."""
    kind, _, rest = name.partition(".")
    if kind == "model":
        return "weights", ""
    if kind != "optimizer":
        return kind, rest
    key = rest.rpartition(".")[2]
    if key == "step":
        return "scalars", key
    return ("master_weights" if key in WEIGHT_KEYS else "moments"), key


def _optimizer_state(
    model: nn.Module,
    optimizer: Optimizer,
    tensors: Mapping[str, Tensor],
    saved_groups: list[dict[str, Any]],
) -> dict[str, Any]:
    """Return a state dict in the order of ``optimizer``'s own groups and parameters."""
    names: dict[Tensor, str] = {value: name for name, value in model.named_parameters()}
    states: dict[str, dict[str, Tensor]] = {}
    for full_name, tensor in tensors.items():
        if full_name.startswith("optimizer."):
            name, _, key = full_name.removeprefix("optimizer.").rpartition(".")
            states.setdefault(name, {})[key] = tensor
    groups: list[dict[str, Any]] = []
    state: dict[int, dict[str, Tensor]] = {}
    for group in optimizer.param_groups:
        members = [_name(names, parameter) for parameter in group["params"]]
        saved = _matching(saved_groups, members)
        identities = dict(zip(saved["params"], saved["identities"], strict=True))
        ids = list(range(len(state), len(state) + len(members)))
        state |= {number: states.get(name, {}) for number, name in zip(ids, members, strict=True)}
        entries = {key: _from_json(value) for key, value in saved.items() if key != "param_names"}
        entries |= {"params": ids, "identities": [identities[name] for name in members]}
        groups.append(entries)
    return {"state": state, "param_groups": groups}


def _matching(saved_groups: list[dict[str, Any]], members: list[str]) -> dict[str, Any]:
    for saved in saved_groups:
        if set(saved["params"]) == set(members):
            return saved
    first = members[0] if members else "an empty group"
    raise ValueError(f"no saved parameter group holds just the parameters of the group of {first}")


def _check_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Raise before anything is written where ``Module.load_state_dict`` would fail or cast."""
    own = model.state_dict()
    for name in sorted(own.keys() ^ weights.keys()):
        where = "not in the checkpoint" if name in own else "not in the model"
        raise ValueError(f"weight {name}: {where}")
    for name, target in own.items():
        saved = weights[name]
        if saved.shape != target.shape or saved.dtype != target.dtype:
            raise ValueError(
                f"weight {name}: saved {saved.dtype} {tuple(saved.shape)}, "
                f"the model has {target.dtype} {tuple(target.shape)}"
            )


def _name(names: Mapping[Tensor, str], parameter: Tensor) -> str:
    if parameter not in names:
        shape = tuple(parameter.shape)
        raise ValueError(f"parameter of shape {shape}: in the optimizer, not in the model")
    return names[parameter]


def _to_json(value: Any) -> Any:
    """Return a setting as JSON; a tensor keeps its dtype, so that a restored lr is one again."""
    if isinstance(value, Tensor):
        return {"tensor": value.item(), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, tuple):
        return {"tuple": [_to_json(item) for item in value]}
    return value


def _from_json(value: Any) -> Any:
    if isinstance(value, dict) and value.keys() == {"tensor", "dtype"}:
        return torch.tensor(value["tensor"], dtype=getattr(torch, value["dtype"]))
    if isinstance(value, dict) and value.keys() == {"tuple"}:
        return tuple(_from_json(item) for item in value["tuple"])
    return value

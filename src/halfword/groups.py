"""A new parameter group: its settings checked, and an identity for each of its parameters."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from halfword import noise
from halfword.rules import Rule
from halfword.settings import check_group, numbers, own_lr


def complete_group(
    group: dict[str, Any], earlier: Sequence[Mapping[str, Any]], rule: Rule, on_nonfinite: str
) -> None:
    """Check a new group, give its parameters ``identities``, and its learning rate a tensor's own.

    Args:
        group: as the user gave it, defaults filled in.
        earlier: the groups before it.
        rule: what updates it.
        on_nonfinite: the optimizer's policy, which no group may change.

    Raises:
        ValueError: a setting that is invalid or cannot be honoured.
    """
    check_group(numbers(group), rule)
    if len(set(group["params"])) < len(group["params"]):
        raise ValueError("params: a parameter appears twice in one group; pass each once")
    if group["on_nonfinite"] != on_nonfinite:
        raise ValueError(
            f"on_nonfinite={group['on_nonfinite']!r} in a group: a step is taken as a whole; "
            f"give it to the optimizer, which has {on_nonfinite!r}"
        )
    group["lr"] = own_lr(group)
    if "param_names" in group:
        names = chain.from_iterable(other["param_names"] for other in earlier)
        group["identities"] = noise.identities_of_names(group["param_names"], names)
    else:
        first = sum(len(other["params"]) for other in earlier)
        positions = range(first, first + len(group["params"]))
        group["identities"] = [noise.identity_of_position(number) for number in positions]

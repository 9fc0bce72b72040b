"""What `halfword plan` is asked: which model, on which ranks, of which memory."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from halfword.errors import UsageError
from halfword.memory import Shape, Sharding
from halfword.memory.arithmetic import shapes_of_count
from halfword.planning.step import shapes
from halfword.train import pretrained
from halfword.train.config import TrainConfig
from halfword.train.footprint import sharding
from halfword.train.reading import load_config, read_settings
from halfword.train.tokenizer import NUM_BYTES
from halfword.train.training import check_world

MOST_PARAMETERS = 10**15  # thousands of times the largest models; torch counts bytes in 64 bits
UNITS = {"": 2**30, "GiB": 2**30, "GB": 10**9, "MiB": 2**20, "MB": 10**6}


@dataclass(frozen=True)
class Request:
    """A question, checked.

    Attributes:
        config: settings of the run.
        world_size: ranks.
        sharding: what the first rank holds; no other holds more.
        shapes: of all parameters.
        vocab_size: rows of the embedding; None where only a number of parameters is known.
        device_memory: bytes of a rank's device, if given.
    """

    config: TrainConfig
    world_size: int
    sharding: Sharding
    shapes: list[Shape]
    vocab_size: int | None
    device_memory: int | None


def read_request(
    file: Path | None,
    params: str | None,
    model: Path | None,
    world_size: int,
    device_memory: str | None,
    flags: Mapping[str, Any],
) -> Request:
    """Check what the command line asks; UsageError says in one line what is wrong."""
    given = read_settings(file, flags)
    if world_size < 1:
        raise UsageError("--world_size", world_size, "must be at least 1")
    shape: dict[str, Any] = {}
    if params is not None:
        _check_alone(params, model, flags)
    elif model is not None:
        shape = pretrained.read_memory_shape(model)
        for name in shape.keys() & given.keys():
            if given[name] != shape[name]:
                fix = f"{model} has {shape[name]}; leave the option out"
                raise UsageError(f"--{name}", given[name], fix)
    config = load_config(file, flags, shape)
    check_world(config, world_size)
    vocab_size = None if params is not None else _vocab_size(config)
    known = shapes_of_count(_count(params)) if params is not None else None
    return Request(
        config,
        world_size,
        sharding(config, world_size),
        known or shapes(config, vocab_size or 0),
        vocab_size,
        None if device_memory is None else _bytes(device_memory),
    )


def _check_alone(params: str, model: Path | None, flags: Mapping[str, Any]) -> None:
    if model is not None:
        raise UsageError("--model", model, "give it or --params, not both")
    for name in sorted(pretrained.SHAPE.keys() & flags.keys()):
        fix = f"is a model's shape; give it or --params {params}, not both"
        raise UsageError(f"--{name}", flags[name], fix)


def _count(text: str) -> int:
    """Return a whole number as people write large ones: 30e9."""
    try:
        number = Decimal(text.replace("_", ""))
    except InvalidOperation:
        number = Decimal("NaN")
    if not number.is_finite() or number < 1 or number != number.to_integral_value():
        raise UsageError("--params", text, "must be a whole number, as 6858007633 or 30e9")
    if number > MOST_PARAMETERS:
        raise UsageError("--params", text, f"must be at most {MOST_PARAMETERS:.0e}")
    return int(number)


def _bytes(text: str) -> int:
    """Return the bytes of a size: a number in GiB, or with GiB, GB, MiB or MB behind it."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(GiB|GB|MiB|MB|)", text.strip())
    if found is None or not float(found[1]):
        raise UsageError("--device_memory", text, "must be a size in GiB, as 80, or as 80GB")
    return int(Decimal(found[1]) * UNITS[found[2]])


def _vocab_size(config: TrainConfig) -> int:
    if config.vocab_size is not None:
        return config.vocab_size
    kind, _, size = config.tokenizer.partition(":")
    if config.tokenizer == "bytes":
        return NUM_BYTES
    if kind == "bpe" and size.isdigit():
        return int(size)
    raise UsageError("--tokenizer", config.tokenizer, "is not read by a plan; give --vocab_size")

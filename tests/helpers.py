"""What tests of the whole optimizer share: rules and formats to run, and comparisons."""

import io
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from halfword import SGD, Adam, AdamW, Lion, Optimizer
from halfword.backends import choose
from halfword.formats import MASTER_WEIGHTS, MOMENTS
from halfword.rules import RULES

OPTIMIZERS = {
    "adamw": partial(AdamW, lr=1e-2, weight_decay=0.1),
    "adam": partial(Adam, lr=1e-2, weight_decay=0.1),
    "lion": partial(Lion, lr=1e-3, weight_decay=0.1),
    "sgd": partial(SGD, lr=1e-2, weight_decay=0.1),
    "sgd_momentum": partial(SGD, lr=1e-2, momentum=0.9, dampening=0.5, weight_decay=0.1),
}
"""An optimizer that uses each rule, with every hyper-parameter at work."""

WEIGHTS = [
    (dtype, setting)
    for dtype, settings in MASTER_WEIGHTS.items()
    for setting, format in settings.items()
    if next(name for name, other in settings.items() if other is format) == setting
]
"""Every (parameter dtype, ``master_weights``) pair, each format of a dtype once."""


def moment_settings(rule: str) -> list[tuple[str, ...]]:
    """Return the choices of formats for the slots of a rule; int8 is beside itself or FP32."""
    settings = product(MOMENTS, repeat=len(RULES[rule].slots))
    return [s for s in settings if "int8" not in s or set(s) <= {"int8", "fp32"}]


def combinations() -> list[Any]:
    """Return (rule, dtype, master_weights, moments) of every supported combination."""
    return [
        (rule, dtype, master_weights, moments)
        for rule, (dtype, master_weights) in product(RULES, WEIGHTS)
        for moments in moment_settings(rule)
    ]


def name_of(combination: Any) -> str:
    """Return a readable test id."""
    rule, dtype, master_weights, moments = combination
    return "-".join([rule, str(dtype).removeprefix("torch."), master_weights, *moments])


def parameters(dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> list[torch.nn.Parameter]:
    """Return parameters of every awkward shape: plain, 0-dim, empty, transposed, whole blocks."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(5, 3), (), (0, 3), (6, 4), (64, 64)]
    made = [
        torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype) for shape in shapes
    ]
    made[3] = made[3].t()
    return [torch.nn.Parameter(tensor) for tensor in made]


def feed(params: Iterable[torch.nn.Parameter], step: int) -> None:
    """Give each parameter a gradient that depends on the step and on nothing else."""
    generator = torch.Generator().manual_seed(1000 + step)
    for p in params:
        gradient = torch.randn(p.shape, generator=generator, dtype=torch.float32)
        p.grad = gradient.to(p.device, p.dtype)


def train(opt: Optimizer, steps: Iterable[int]) -> None:
    """Take steps on gradients from ``feed``."""
    params = [p for group in opt.param_groups for p in group["params"]]
    for step in steps:
        feed(params, step)
        opt.step()


def constant(value: float, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Parameter:
    """Return a parameter filled with one value."""
    return torch.nn.Parameter(torch.full(shape, value, dtype=dtype))


def pattern(tensor: Tensor) -> Tensor:
    """Return the stored bits of any tensor as integers, all NaNs as one."""
    tensor = tensor.detach()
    if tensor.is_floating_point():
        tensor = torch.where(tensor.isnan(), torch.nan, tensor)
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(integer[tensor.dtype.itemsize])


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have one dtype, one shape and the same bits, NaNs counted as equal."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(pattern(a), pattern(b))


def snapshot(opt: Optimizer) -> list[dict[str, Tensor]]:
    """Return copies of every parameter's weight, master and state."""
    return [
        {"weight": p.detach().clone(), "master": opt.master_weight(p)}
        | {key: tensor.clone() for key, tensor in opt.state[p].items()}
        for group in opt.param_groups
        for p in group["params"]
    ]


def assert_same_training(a: Optimizer, b: Optimizer) -> None:
    """Two optimizers hold the same weights, masters and states, bit for bit."""
    assert_same_snapshot(snapshot(a), snapshot(b))


def assert_same_snapshot(a: list[dict[str, Tensor]], b: list[dict[str, Tensor]]) -> None:
    """Two snapshots agree bit for bit."""
    assert len(a) == len(b)
    for position, (one, other) in enumerate(zip(a, b, strict=True)):
        assert one.keys() == other.keys(), f"parameter {position}"
        for key in one:
            assert same(one[key], other[key]), f"parameter {position}: {key} differs"


def require(backend: str) -> None:
    """Skip the test, with the reason, where a backend does not work on this machine."""
    try:
        choose(backend)
    except ValueError as reason:
        pytest.skip(str(reason))


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Let torch use this many threads for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def through_disk(saved: Any) -> Any:
    """Return what ``torch.save`` and a weights-only ``torch.load`` make of an object."""
    buffer = io.BytesIO()
    torch.save(saved, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)

"""Planned bytes against the definition: what real optimizers hold, and how torch cuts tensors."""

import math

import pytest
import torch

import halfword
from halfword.memory import Sharding, plan
from halfword.memory.arithmetic import shapes_of_count
from halfword.train.config import PRESETS

SHAPES = [(130, 64), (64, 128), (50, 100), (128,), (7, 3)]
OPTIMIZERS = {"adamw": halfword.AdamW, "lion": halfword.Lion, "sgd": halfword.SGD}


@pytest.mark.parametrize("rule", OPTIMIZERS)
@pytest.mark.parametrize("preset", PRESETS)
def test_the_plan_is_what_an_optimizer_holds(preset, rule):
    parameters = [torch.nn.Parameter(torch.ones(shape).bfloat16()) for shape in SHAPES]
    optimizer = OPTIMIZERS[rule](parameters, lr=0.1, **PRESETS[preset]._asdict())
    planned = plan(SHAPES, *PRESETS[preset], rule, Sharding())
    assert _without_empty(optimizer.memory()) == _without_empty(planned["between_steps"])
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    assert _without_empty(optimizer.memory()) == _without_empty(planned["at_step_entry"])


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("first", [1, 2, 5, 7, 130])
def test_rows_are_cut_as_torch_cuts_them(first, size):
    chunks = torch.empty(first, 2).chunk(size)
    lengths = [len(part) for part in chunks] + [0] * (size - len(chunks))
    shardings = [Sharding(3, size, size, rank) for rank in range(size)]
    assert [sharding.rows(first) for sharding in shardings] == lengths
    assert {sharding.weight_rows(first) for sharding in shardings} == {lengths[0]}


@pytest.mark.parametrize(
    ("settings", "gradients", "communication"),
    [
        ({}, 2, 0),
        ({"accumulated": True}, 4, 2),
        ({"released": True}, 0, 2),
    ],
)
def test_buckets_are_gradients_or_wait_for_them(settings, gradients, communication):
    """DistributedDataParallel keeps 2 bytes a parameter; gradients are views of them, or beside."""
    sharding = Sharding(zero_stage=0, world_size=2, size=2)
    planned = plan([(64, 64)], "split", "fp32", "adamw", sharding, **settings)
    entry = planned["at_step_entry"].components
    assert sum(entry.get("gradients", {}).values()) == gradients * 4096
    assert sum(entry.get("communication", {}).values()) == communication * 4096
    assert planned["between_steps"].components["communication"] == {"buckets": 2 * 4096}


def test_moments_of_one_stage_are_shared_and_weights_are_not():
    one = plan([(64, 64)], "split", "int8", "adamw", Sharding(1, 4, 4))["between_steps"].components
    assert one["weights"] == {"bfloat16": 2 * 4096}
    assert one["master_weights"] == {"remainder": 2 * 1024}
    assert one["moments"]["exp_avg_code"] == 1024
    assert one["moments"]["exp_avg_scale"] == 4 * 1024 // 64


@pytest.mark.parametrize("count", [1, 63, 64, 6_858_007_633])
def test_a_count_alone_is_kept(count):
    assert sum(map(math.prod, shapes_of_count(count))) == count


def _without_empty(memory):
    return {name: planes for name, planes in memory.components.items() if planes}

"""Loops of a user's own on two ranks: a call too much or too few changes no bits in silence."""

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from halfword import AdamW
from halfword.parallel import Parallel, gather, parallelize
from halfword.shards import local
from helpers import same
from parallel_cases import STAGES, Digests, digest, digests
from ranks import launch

SIZE = 2


def made(stage: int, mesh: DeviceMesh) -> tuple[Parallel, AdamW]:
    """A small model and its optimizer."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)).bfloat16()
    model = parallelize(layers, stage, mesh, units=[layers[0]])
    optimizer = AdamW(list(model.named_parameters()), lr=1e-2)
    model.attach(optimizer)
    return model, optimizer


def inputs(mesh: DeviceMesh) -> torch.Tensor:
    return torch.full((2, 6), mesh.get_rank() + 1.0).bfloat16()


def stepped(stage: int, mesh: DeviceMesh, accumulate: int = 0) -> Digests:
    """Planes after a step on gradients of two passes, accumulated after so many calls."""
    model, optimizer = made(stage, mesh)
    for _ in range(accumulate):
        model.accumulate_in_fp32(optimizer)
    for _ in range(2):
        model.backward(model(inputs(mesh)).float().square().mean())
    optimizer.step()
    return digests(model, optimizer)


def accumulated(stage: int, mesh: DeviceMesh, parts: list[slice]) -> Digests:
    """FP32 sums of two passes, with an optimizer for each part of the weights."""
    model, _ = made(stage, mesh)
    named = list(model.named_parameters())
    optimizers = [AdamW(named[part]) for part in parts]
    handles = [model.accumulate_in_fp32(optimizer) for optimizer in optimizers]
    for _ in range(2):
        model.backward(model(inputs(mesh)).float().square().mean())
    assert not any(handle._offered for handle in handles), "sums are kept that nobody takes"
    sums = {p: buffer for handle in handles for p, buffer in handle.buffers.items()}
    return {name: digest(gather(sums[p])) for name, p in named if p in sums}


def released(stage: int, mesh: DeviceMesh, release: bool) -> Digests:
    """Planes after two steps, whose gradients may be released as they arrive."""
    model, optimizer = made(stage, mesh)
    if release:
        optimizer.release_gradients()
    for _ in range(2):
        model.backward(model(inputs(mesh)).float().square().mean())
        assert release == all(p.grad is None for p in optimizer.parameters())
        optimizer.step()
        optimizer.zero_grad()
    return digests(model, optimizer)


def looked_at(stage: int, mesh: DeviceMesh, forward_only: bool) -> str:
    """Outputs after a step, before which a forward pass without a backward pass may have come."""
    model, optimizer = made(stage, mesh)
    model.backward(model(inputs(mesh)).float().square().mean())
    if forward_only:
        model(inputs(mesh))
    optimizer.step()
    return digest(model(inputs(mesh)).detach())


def copied(stage: int, mesh: DeviceMesh, by: Callable[[Any], Any]) -> bool:
    """Whether a copy of an optimizer, taken between steps, takes the next step as it does."""
    model, optimizer = made(stage, mesh)
    model.backward(model(inputs(mesh)).float().square().mean())
    optimizer.step()
    optimizer.zero_grad()
    twin = by(optimizer)
    own, others = ([local(p) for p in it.param_groups[0]["params"]] for it in (optimizer, twin))
    for each in (optimizer, twin):
        for p in each.param_groups[0]["params"]:
            p.grad = torch.ones_like(p)
        each.step()
    apart = all(a.data_ptr() != b.data_ptr() for a, b in zip(own, others, strict=True) if len(a))
    return apart and all(map(same, own, others))


def pickled(optimizer: AdamW) -> Any:
    return pickle.loads(pickle.dumps(optimizer))


def copied_weights(stage: int, mesh: DeviceMesh) -> bool:
    """Whether a copy of a state dict holds the same."""
    weights = made(stage, mesh)[0].state_dict()
    others = copy.deepcopy(weights)
    return all(same(local(weights[name]), local(others[name])) for name in weights)


def without_backward(stage: int, mesh: DeviceMesh) -> str:
    """The error where ``loss.backward()`` was called."""
    model, optimizer = made(stage, mesh)
    model(inputs(mesh)).float().square().mean().backward()
    return message_of(optimizer.step)


def wrong_shape(stage: int, mesh: DeviceMesh) -> str:
    """The error for a state dict with one row of a weight."""
    model, _ = made(stage, mesh)
    wrong = {**model.state_dict(), "0.weight": torch.zeros(1, 6).bfloat16()}
    return message_of(functools.partial(model.load_state_dict, wrong))


def message_of(call: Any) -> str:
    try:
        call()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "nothing"


def sums(rank: int, size: int) -> dict[int, bool]:
    """Whether the first backward pass of a process adds up as later ones do, to the last bit."""
    mesh = init_device_mesh("cpu", (size,))
    found = {}
    for stage in STAGES:
        torch.manual_seed(0)
        layers = nn.Sequential(*(nn.Linear(400, 400) for _ in range(5))).bfloat16()  # > 1 MiB
        model = parallelize(layers, stage, mesh)
        optimizer = AdamW(list(model.named_parameters()))
        model.attach(optimizer)
        handle = model.accumulate_in_fp32(optimizer)
        # Of such magnitudes that the order of ranks shows.
        batch = torch.randn(4, 400) * torch.logspace(-6, 6, 400) * 10.0 ** (3 * rank - 4)
        passes = []
        for _ in range(2):
            model.backward(1e-6 * model(batch.bfloat16()).float().square().mean())
            passes.append({p: local(buffer) for p, buffer in handle.buffers.items()})
            optimizer.zero_grad()
        first, second = passes
        found[stage] = all(same(first[p], second[p]) for p in first)
    return found


def unused(rank: int, size: int) -> dict[int, Digests]:
    """Planes after steps of a model with a weight that no output depends on."""
    mesh = init_device_mesh("cpu", (size,))
    found = {}
    for stage in STAGES:
        torch.manual_seed(0)
        layer = nn.Linear(6, 5)
        layer.unused = nn.Parameter(torch.ones(3))
        model = parallelize(layer.bfloat16(), stage, mesh)
        optimizer = AdamW(list(model.named_parameters()))
        model.attach(optimizer)
        for _ in range(2):
            model.backward(model(inputs(mesh)).float().square().mean())
            optimizer.step()
            optimizer.zero_grad()
        found[stage] = digests(model, optimizer)
    return found


def run_all(rank: int, size: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (size,))
    copies = init_device_mesh("cpu", (size, 1), mesh_dim_names=("replicate", "shard"))
    return {
        "stepped": {stage: stepped(stage, mesh) for stage in STAGES},
        "copies": {stage: stepped(stage, copies) for stage in STAGES},
        "once": {stage: stepped(stage, mesh, accumulate=1) for stage in STAGES},
        "twice": {stage: stepped(stage, mesh, accumulate=2) for stage in STAGES},
        "of one": {stage: accumulated(stage, mesh, [slice(3)]) for stage in STAGES},
        "of two": {stage: accumulated(stage, mesh, [slice(1), slice(1, 3)]) for stage in STAGES},
        "released": {stage: released(stage, mesh, True) for stage in STAGES},
        "kept": {stage: released(stage, mesh, False) for stage in STAGES},
        "after a step": {stage: looked_at(stage, mesh, False) for stage in STAGES},
        "after a look": {stage: looked_at(stage, mesh, True) for stage in STAGES},
        "deep copy": {stage: copied(stage, mesh, copy.deepcopy) for stage in STAGES},
        "pickle": {stage: copied(stage, mesh, pickled) for stage in STAGES},
        "state dict": {stage: copied_weights(stage, mesh) for stage in STAGES},
        "without backward": {stage: without_backward(stage, mesh) for stage in (0, 1)},
        "wrong shape": {stage: wrong_shape(stage, mesh) for stage in STAGES},
    }


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return launch(SIZE, run_all)


def test_the_first_backward_pass_adds_up_as_later_ones_do():
    """Else a resumed run, whose first pass is a later one of the run that went on, would differ."""
    for rank in launch(3, sums):
        assert rank == dict.fromkeys(STAGES, True)


def test_a_weight_that_is_not_used_stays_in_every_stage():
    for rank in launch(SIZE, unused):
        assert all(rank[stage] == rank[0] for stage in STAGES)


def test_copies_alone_average_gradients_as_shards_do(found):
    for rank in found:
        assert rank["copies"] == rank["stepped"]


def test_to_accumulate_twice_is_to_accumulate_once(found):
    for rank in found:
        assert rank["twice"] == rank["once"]


def test_two_optimizers_accumulate_as_one_does(found):
    for rank in found:
        assert rank["of two"] == rank["of one"]
        assert all(len(sums) == 3 for sums in rank["of one"].values())


def test_released_gradients_give_the_same_bits(found):
    for rank in found:
        assert rank["released"] == rank["kept"]


def test_a_forward_pass_alone_leaves_no_stale_weights(found):
    for rank in found:
        assert rank["after a look"] == rank["after a step"]


@pytest.mark.parametrize("way", ["deep copy", "pickle", "state dict"])
def test_copies_of_every_stage_hold_the_same(found, way):
    for rank in found:
        assert rank[way] == dict.fromkeys(STAGES, True)


def test_gradients_that_miss_the_optimizer_are_told_of(found):
    for rank in found:
        for message in rank["without backward"].values():
            assert message.endswith("call model.backward(loss) for loss.backward()")


def test_a_weight_of_another_shape_is_refused_on_all_ranks(found):
    for rank in found:
        for message in rank["wrong shape"].values():
            assert "size mismatch for 0.weight" in message

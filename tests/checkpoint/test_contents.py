import pytest
import torch

from bits import same_bits
from halfword import AdamW
from halfword.checkpoint import flatten, restore
from halfword.formats import MASTER_WEIGHTS, MOMENTS

from .conftest import train

WEIGHTS = MASTER_WEIGHTS[torch.bfloat16]


def _copies(tensors):
    return {name: tensor.clone() for name, tensor in tensors.items()}


@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("master", WEIGHTS)
def test_restoring_and_going_on_equals_never_having_stopped(make, master, moments):
    model, opt = make(3, master_weights=master, moments=moments, seed=5)
    tensors, settings = flatten(model, opt)
    tensors = _copies(tensors)
    train(model, opt, 4, seed=2)
    resumed, resumed_opt = make(1, master_weights=master, moments=moments, lr=0.5)
    restore(resumed, resumed_opt, tensors, settings)
    train(resumed, resumed_opt, 4, seed=2)
    expected, _ = flatten(model, opt)
    found, _ = flatten(resumed, resumed_opt)
    assert expected.keys() == found.keys()
    assert all(same_or_equal(expected[name], found[name]) for name in expected)


def same_or_equal(a, b):
    return same_bits(a, b) if a.is_floating_point() else torch.equal(a, b)


def test_a_tied_weight_is_stored_once_and_restored_as_one(make):
    model, opt = make(1)
    tensors, settings = flatten(model, opt)
    assert settings["ties"] == {"head.weight": "embed.weight"}
    assert "model.head.weight" not in tensors
    other, other_opt = make(0)
    restore(other, other_opt, tensors, settings)
    assert other.head.weight is other.embed.weight
    assert torch.equal(other.embed.weight, model.embed.weight)


def test_groups_in_another_order_find_their_states_and_noise(make):
    model, opt = make(2, moments="bf16-sr")
    tensors, settings = flatten(model, opt)
    other, other_opt = make(0, reverse=True, moments="bf16-sr")
    restore(other, other_opt, _copies(tensors), settings)
    train(model, opt, 2, seed=3)
    train(other, other_opt, 2, seed=3)
    assert torch.equal(model.embed.weight, other.embed.weight)
    assert [g["weight_decay"] for g in other_opt.param_groups] == [0.0, 0.01]


def test_settings_survive_json_with_their_types(make):
    import json

    model, opt = make(1, lr=torch.tensor(0.25, dtype=torch.float64), betas=(0.8, 0.9))
    tensors, settings = flatten(model, opt)
    other, other_opt = make(0)
    restore(other, other_opt, tensors, json.loads(json.dumps(settings)))
    lr = other_opt.param_groups[0]["lr"]
    assert isinstance(lr, torch.Tensor) and lr.dtype == torch.float64 and lr == 0.25
    assert other_opt.param_groups[0]["betas"] == (0.8, 0.9)


def test_exact_conversions_are_taken_and_others_refused(make):
    model, opt = make(3, master_weights="fp32")
    tensors, settings = flatten(model, opt)
    other, other_opt = make(0, master_weights="split")
    restore(other, other_opt, tensors, settings)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert same_bits(opt.master_weight(a), other_opt.master_weight(b))
    third, third_opt = make(0, master_weights="split24")
    with pytest.raises(
        ValueError, match="parameter 'empty': master weight: bf16.fp32 to split24 would"
    ):
        restore(third, third_opt, tensors, settings)


def test_what_does_not_fit_is_refused_by_name(make):
    model, opt = make(1)
    tensors, settings = flatten(model, opt)
    smaller = {name: value for name, value in tensors.items() if name != "model.head.bias"}
    with pytest.raises(ValueError, match="weight head.bias: not in the checkpoint"):
        restore(*make(0), smaller, settings)
    with pytest.raises(
        ValueError, match=r"weight seen: saved torch.bfloat16 \(2,\), the model has"
    ):
        restore(*make(0), tensors | {"model.seen": torch.zeros(2).bfloat16()}, settings)
    alone = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(
        ValueError, match=r"parameter of shape \(2,\): in the optimizer, not in the"
    ):
        flatten(model, AdamW([alone]))
    one_group = AdamW(list(model.named_parameters()))
    with pytest.raises(ValueError, match="no saved parameter group holds just the parameters"):
        restore(model, one_group, tensors, settings)

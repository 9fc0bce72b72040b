import pytest
import torch

from bits import same_bits
from halfword import AdamW, fp32_state_dict, load_fp32_state_dict


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(8, 4)
        self.head = torch.nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight
        self.norm = torch.nn.BatchNorm1d(8)


def _trained(**settings):
    torch.manual_seed(0)
    model = Tied().bfloat16()
    opt = AdamW(model.named_parameters(), **settings)
    for _ in range(3):
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        opt.step()
    return model, opt


def test_the_state_dict_holds_masters_buffers_and_ties():
    model, opt = _trained()
    state = fp32_state_dict(model, opt)
    assert state.keys() == model.state_dict().keys()
    assert state["head.weight"] is state["embed.weight"]
    assert same_bits(state["embed.weight"], opt.master_weight(model.embed.weight))
    assert state["norm.running_mean"].dtype == torch.bfloat16
    assert not state["embed.weight"].requires_grad


@pytest.mark.parametrize("master", ["split", "fp32"])
def test_loading_restores_masters_exactly(master):
    source, source_opt = _trained()
    target, target_opt = _trained(master_weights=master, lr=0.1)
    load_fp32_state_dict(target, target_opt, fp32_state_dict(source, source_opt))
    for a, b in zip(source.parameters(), target.parameters(), strict=True):
        assert same_bits(a.data, b.data)
        assert same_bits(source_opt.master_weight(a), target_opt.master_weight(b))


def test_a_wider_state_dict_is_rounded_once():
    model, opt = _trained()
    state = {name: value.double() for name, value in fp32_state_dict(model, opt).items()}
    load_fp32_state_dict(model, opt, state)
    assert torch.equal(opt.master_weight(model.embed.weight).double(), state["embed.weight"])


def test_wrong_names_and_shapes_change_nothing():
    model, opt = _trained()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = fp32_state_dict(model, opt)
    with pytest.raises(ValueError, match="embed.weight: missing in the state dict"):
        load_fp32_state_dict(model, opt, {k: v for k, v in state.items() if k != "embed.weight"})
    with pytest.raises(ValueError, match="other: not a name of the model"):
        load_fp32_state_dict(model, opt, state | {"other": torch.ones(1)})
    with pytest.raises(ValueError, match=r"norm.bias: shape \(3,\), must be \(8,\)"):
        load_fp32_state_dict(model, opt, state | {"norm.bias": torch.ones(3)})
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_parameter_of_another_model_is_refused():
    _, opt = _trained()
    with pytest.raises(ValueError, match=r"parameter of shape \(2,\): not in this optimizer"):
        opt.master_weight(torch.nn.Parameter(torch.ones(2)))


def test_refreshing_makes_masters_what_was_written():
    model, opt = _trained()
    model.embed.weight.data.fill_(0.75)
    opt.refresh_master_weights()
    assert torch.equal(opt.master_weight(model.embed.weight), torch.full((8, 4), 0.75))

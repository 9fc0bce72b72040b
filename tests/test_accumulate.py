import torch

from halfword import AdamW


def _model():
    torch.manual_seed(0)
    return torch.nn.Linear(16, 16).bfloat16()


def _micro_batches(count):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 16, generator=generator).bfloat16() for _ in range(count)]


def test_gradients_add_up_in_fp32():
    model = _model()
    opt = AdamW(model.parameters())
    opt.accumulate_in_fp32()
    expected = torch.zeros(16, 16)
    for batch in _micro_batches(8):
        model(batch).square().mean().backward()
        assert model.weight.grad is None
        single = _model()
        single(batch).square().mean().backward()
        expected += single.weight.grad.float()
    handle = opt.accumulate_in_fp32()
    assert torch.equal(handle.buffers[model.weight], expected)
    assert opt.memory().components["gradients"] == {"float32": 4 * (16 * 16 + 16)}


def test_a_step_uses_the_accumulated_gradient_and_zero_grad_frees_it():
    model, other = _model(), _model()
    opt, plain = AdamW(model.parameters()), AdamW(other.parameters())
    handle = opt.accumulate_in_fp32()
    for batch in _micro_batches(4):
        model(batch).square().mean().backward()
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        b.grad_dtype = torch.float32
        b.grad = handle.buffers[a].clone()
    assert torch.equal(opt.clip_grad_norm(0.1), plain.clip_grad_norm(0.1))
    opt.step()
    plain.step()
    assert torch.equal(model.weight, other.weight)
    assert torch.equal(opt.master_weight(model.weight), plain.master_weight(other.weight))
    opt.zero_grad()
    assert not handle.buffers


def test_closing_restores_plain_gradients():
    model = _model()
    opt = AdamW(model.parameters())
    handle = opt.accumulate_in_fp32()
    handle.close()
    handle.close()
    model(_micro_batches(1)[0]).sum().backward()
    assert model.weight.grad.dtype == torch.bfloat16
    again = opt.accumulate_in_fp32()
    assert again is not handle and opt.accumulate_in_fp32() is again


def test_frozen_and_later_parameters_are_accumulated_too():
    model = _model()
    model.bias.requires_grad_(False)
    opt = AdamW([model.weight, model.bias])
    handle = opt.accumulate_in_fp32()
    assert not model.bias.requires_grad
    model.bias.requires_grad_(True)
    late = torch.nn.Parameter(torch.ones(16).bfloat16())
    opt.add_param_group({"params": [late]})
    (model(_micro_batches(1)[0]) * late).sum().backward()
    assert set(handle.buffers) == {model.weight, model.bias, late}

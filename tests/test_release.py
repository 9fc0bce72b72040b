"""Gradient release: the bits of ordinary steps, without ever holding all gradients."""

import copy
import gc

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from halfword import SGD, AdamW, Lion
from helpers import same

STEPS = 4


class Tied(nn.Module):
    """An embedding that is used twice, a matrix, and a parameter that no loss depends on."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.unused = nn.Parameter(torch.ones(3))
        self.checkpointed = False

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + (checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x))
        return (x @ self.embedding.weight.T).float().logsumexp(-1).mean()


def tokens(step, part=0):
    return torch.randint(0, 50, (4, 8), generator=torch.Generator().manual_seed(10 * step + part))


def make(cls=AdamW, **settings):
    model = Tied().bfloat16()
    return model, cls(model.named_parameters(), lr=1e-2, **settings)


def snapshot(model, opt):
    states = [value for p in model.parameters() for value in opt.state[p].values()]
    return [*(p.detach() for p in model.parameters()), *states]


def assert_equal(one, other):
    assert all(same(a, b) for a, b in zip(snapshot(*one), snapshot(*other), strict=True))


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("moments", ["fp32", "bf16-sr"])
@pytest.mark.parametrize("cls", [AdamW, Lion, SGD])
def test_released_steps_have_the_bits_of_ordinary_ones(cls, moments, backend):
    settings = {"moments": moments, "backend": backend}
    if cls is SGD:
        settings |= {"momentum": 0.9}
    ends = []
    for release in (False, True):
        model, opt = make(cls, **settings)
        if release:
            opt.release_gradients()
        for step in range(STEPS):
            model(tokens(step)).backward()
            if release:
                assert all(p.grad is None for p in model.parameters())
            opt.step()
            opt.zero_grad()
        ends.append((model, opt))
    assert_equal(*ends)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_parameter_that_is_used_twice_steps_once(checkpointed):
    model, opt = make()
    model.checkpointed = checkpointed
    opt.release_gradients()
    for step in range(3):
        model(tokens(step)).backward()
    assert opt.state[model.embedding.weight]["step"] == 3
    assert opt.state[model.layers[0].weight]["step"] == 3
    assert opt.state[model.unused]["step"] == 0


@pytest.mark.parametrize("fp32", [False, True])
@pytest.mark.parametrize("release_first", [False, True])
def test_micro_batches_are_held_until_the_last(fp32, release_first):
    ends = []
    for release in (False, True):
        model, opt = make()
        handle = opt.release_gradients() if release and release_first else None
        if fp32:
            opt.accumulate_in_fp32()
        if release and not release_first:
            handle = opt.release_gradients()
        for step in range(STEPS):
            if handle:
                with handle.hold():
                    model(tokens(step, 0)).backward()
                    model(tokens(step, 1)).backward()
                assert opt.state[model.embedding.weight]["step"] == step
                held = opt.memory().components["gradients"]
                assert sum(held.values()) > 0
            else:
                model(tokens(step, 0)).backward()
                model(tokens(step, 1)).backward()
            model(tokens(step, 2)).backward()
            opt.step()
            opt.zero_grad()
        ends.append((model, opt))
    assert_equal(*ends)


def test_step_does_what_the_last_micro_batch_did_not_touch():
    model, opt = make()
    handle = opt.release_gradients()
    with handle.hold():
        model(tokens(0)).backward()
    model.layers[0].weight.float().sum().backward()
    assert opt.state[model.layers[0].weight]["step"] == 1
    assert opt.state[model.embedding.weight]["step"] == 0
    opt.step()
    assert opt.state[model.embedding.weight]["step"] == 1
    assert opt.state[model.layers[0].weight]["step"] == 1
    assert all(p.grad is None for p in model.parameters())


def test_gradients_are_freed_one_by_one():
    """The most gradient elements alive at once: those of the largest parameter and one more."""
    model, opt = make()
    alive, most = [0], [0]
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: alive.append(_held(model)))
    opt.release_gradients()
    model(tokens(0)).backward()
    most = max(alive)
    assert most <= model.embedding.weight.numel() + model.layers[0].weight.numel()


def _held(model):
    gc.collect()
    return sum(p.grad.numel() for p in model.parameters() if p.grad is not None)


def test_each_parameter_is_clipped_by_itself_and_the_norm_is_measured():
    model, opt = make()
    clipped, expected = copy.deepcopy(model), []
    reference = AdamW(clipped.named_parameters(), lr=1e-2)
    clipped(tokens(0)).backward()
    total = torch.nn.utils.get_total_norm(
        [p.grad.double() for p in clipped.parameters() if p.grad is not None]
    )
    for p in clipped.parameters():
        if p.grad is not None:
            others = [(q, q.grad) for q in clipped.parameters() if q is not p]
            for q, _ in others:
                q.grad = None
            reference.clip_grad_norm(0.01)
            reference.step()
            for q, gradient in others:
                q.grad = gradient
            p.grad = None
            expected.append(p)
    handle = opt.release_gradients(max_norm=0.01)
    model(tokens(0)).backward()
    assert_equal((model, opt), (clipped, reference))
    torch.testing.assert_close(handle.total_norm(), total.double())
    assert handle.total_norm() == 0


def test_closing_restores_ordinary_steps():
    model, opt = make()
    handle = opt.release_gradients()
    handle.close()
    handle.close()
    model(tokens(0)).backward()
    assert all(p.grad is not None for p in model.parameters() if p is not model.unused)
    opt.clip_grad_norm(1.0)
    opt.step()
    assert opt.state[model.embedding.weight]["step"] == 1
    with opt.release_gradients():
        model(tokens(0)).backward()
    assert opt.state[model.embedding.weight]["step"] == 2
    model(tokens(0)).backward()
    assert opt.state[model.embedding.weight]["step"] == 2


def test_new_groups_are_released_too():
    model, opt = make()
    opt.release_gradients()
    extra = nn.Parameter(torch.ones(4).bfloat16())
    opt.add_param_group({"params": [("extra", extra)]})
    extra.sum().backward()
    assert extra.grad is None and opt.state[extra]["step"] == 1


@pytest.mark.parametrize("policy", ["skip", "raise"])
def test_policies_over_all_gradients_are_refused(policy):
    _, opt = make(on_nonfinite=policy)
    with pytest.raises(ValueError, match=f"on_nonfinite='{policy}': needs all gradients"):
        opt.release_gradients()


def test_global_clipping_is_refused():
    model, opt = make()
    model(tokens(0)).backward()
    opt.clip_grad_norm(1e-3)
    with pytest.raises(ValueError, match="clip each parameter's gradient by release_gradients"):
        opt.release_gradients()
    opt.zero_grad()
    opt.release_gradients()
    with pytest.raises(ValueError, match=r"released one by one; clip each parameter's by"):
        opt.clip_grad_norm(1.0)
    with pytest.raises(ValueError, match="is on already"):
        opt.release_gradients()


@pytest.mark.parametrize("max_norm", [-1.0, float("nan")])
def test_a_norm_that_is_none_is_refused(max_norm):
    _, opt = make()
    with pytest.raises(ValueError, match=f"max_norm={max_norm}: must be at least 0"):
        opt.release_gradients(max_norm=max_norm)


def test_a_new_learning_rate_and_new_data_are_seen_between_passes():
    model, opt = make()
    opt.release_gradients()
    model(tokens(0)).backward()
    opt.param_groups[0]["lr"] = 0.0
    p = model.layers[0].weight
    p.data = p.data.clone()
    before = p.detach().clone()
    model(tokens(1)).backward()
    assert torch.equal(p, before) and opt.state[p]["step"] == 2


def test_an_optimizer_that_is_let_go_steps_no_more():
    model, opt = make()
    opt.release_gradients()
    before = model.layers[0].weight.detach().clone()
    del opt
    gc.collect()
    model(tokens(0)).backward()
    assert torch.equal(model.layers[0].weight, before)
    assert model.layers[0].weight.grad is not None


def test_a_pass_that_is_broken_off_leaves_no_norm():
    model, opt = make()
    handle = opt.release_gradients(max_norm=float("inf"))
    model(tokens(0)).backward()
    opt.zero_grad()
    assert handle.total_norm() == 0

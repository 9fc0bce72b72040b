"""Stalled updates, counted against a model of each format in float64."""

import pytest
import torch

from halfword import AdamW

WEIGHT = torch.linspace(0.5, 2.0, 4096)


def diagnosed(master_weights, lr, steps=1, **settings):
    p = torch.nn.Parameter(WEIGHT.bfloat16().clone())
    opt = AdamW([p], lr=lr, weight_decay=0.0, master_weights=master_weights, **settings)
    with opt.diagnostics() as diagnostics:
        for _ in range(steps):
            p.grad = torch.ones_like(p)
            before = p.detach().clone()
            opt.step()
    return diagnostics, (p.detach() == before).double().mean().item()


@pytest.mark.parametrize("format", ["fp32", "split"])
@pytest.mark.parametrize("lr", [1e-7, 1e-2])
def test_formats_that_hold_fp32_never_stall(format, lr):
    diagnostics, _ = diagnosed(format, lr)
    assert list(diagnostics.stalled.values()) == [0.0]


@pytest.mark.parametrize("format", ["bf16", "bf16-sr"])
def test_the_share_is_that_of_weights_that_stayed(format):
    for lr in (1e-5, 1e-3, 3e-3, 1e-1):
        diagnostics, stayed = diagnosed(format, lr)
        assert diagnostics.stalled == {format: stayed}


def test_split24_stalls_below_its_16_bits():
    assert diagnosed("split24", 1e-3)[0].stalled == {"split24": 0.0}
    assert diagnosed("split24", 1e-6)[0].stalled["split24"] == 1.0


def test_a_second_moment_in_bf16_cannot_decay():
    """0.999 v rounds back to v."""
    p = torch.nn.Parameter(WEIGHT.bfloat16().clone())
    opt = AdamW([p], moments="bf16", betas=(0.9, 0.999))
    p.grad = torch.ones_like(p)
    opt.step()
    p.grad = torch.zeros_like(p)
    with opt.diagnostics() as diagnostics:
        opt.step()
    assert diagnostics.counts["exp_avg_sq", "bf16"].share == 1.0
    assert diagnostics.counts["exp_avg", "bf16"].share == 0.0


def test_counting_changes_no_bits_and_ends_when_closed():
    ends = []
    for count in (False, True):
        p = torch.nn.Parameter(WEIGHT.bfloat16().clone())
        opt = AdamW([p], moments="bf16-sr", master_weights="bf16-sr", lr=1e-3)
        handle = opt.diagnostics() if count else None
        for _ in range(3):
            p.grad = torch.ones_like(p)
            opt.step()
        ends.append([p.detach(), *opt.state[p].values()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
    counted = handle.counts["weight", "bf16-sr"].elements
    handle.close()
    p.grad = torch.ones_like(p)
    opt.step()
    assert handle.counts["weight", "bf16-sr"].elements == counted == 3 * p.numel()


def test_released_gradients_are_counted_too():
    p = torch.nn.Parameter(WEIGHT.bfloat16().clone())
    opt = AdamW([p], master_weights="bf16", lr=1e-6)
    opt.release_gradients()
    with opt.diagnostics() as diagnostics:
        p.float().sum().backward()
    assert diagnostics.stalled == {"bf16": 1.0}


def test_a_second_handle_is_refused():
    p = torch.nn.Parameter(WEIGHT.bfloat16().clone())
    opt = AdamW([p])
    with opt.diagnostics():
        with pytest.raises(ValueError, match="is on already; close its handle first"):
            opt.diagnostics()
    opt.diagnostics().close()

import math

import pytest
import torch

from bits import from_bits, golden_column, golden_rows, same_bits
from halfword.rules import RULES

GROUP = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.1,
    "momentum": 0.9,
    "dampening": 0.25,
    "nesterov": False,
    "decoupled_weight_decay": False,
}


def _fp32(scalars):
    return tuple(torch.tensor(scalars, dtype=torch.float64).float().tolist())


def test_adamw_equals_the_golden_vectors():
    rule, rows = RULES["adamw"], golden_rows("adamw.csv")
    by_step = [[row for row in rows if int(row["step"]) == step] for step in range(9)]
    x = from_bits(golden_column(by_step[0], "x_bits"))
    slots = (torch.zeros_like(x), torch.zeros_like(x))
    for step in range(1, 9):
        g = from_bits(golden_column(by_step[step], "grad_bits"))
        x, slots = rule.update(x, g, slots, _fp32(rule.scalars(GROUP, step)))
        assert same_bits(x, from_bits(golden_column(by_step[step], "x_bits")))
        for slot, column in zip(slots, ("exp_avg_bits", "exp_avg_sq_bits"), strict=True):
            assert same_bits(slot, from_bits(golden_column(by_step[step], column)))


def _float64(name, group, x, gradients):
    """The textbook forms, in float64."""
    lr, wd, (b1, b2), eps = group["lr"], group["weight_decay"], group["betas"], group["eps"]
    m, v, b = torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(x)
    for t, g in enumerate(gradients, start=1):
        if name in ("adamw", "adam"):
            g = g + wd * x if name == "adam" else g
            x = x * (1 - lr * wd) if name == "adamw" else x
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
            x = x - lr * (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + eps)
        elif name == "lion":
            x = x * (1 - lr * wd) - lr * torch.sign(b1 * m + (1 - b1) * g)
            m = b2 * m + (1 - b2) * g
        else:
            g = g + wd * x
            b = (
                g
                if t == 1 or name == "sgd"
                else group["momentum"] * b + (1 - group["dampening"]) * g
            )
            x = x - lr * b
    return x


@pytest.mark.parametrize("name", RULES)
def test_every_rule_follows_its_textbook_form_in_float64(name):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1000, generator=generator)
    gradients = [torch.randn(1000, generator=generator) for _ in range(20)]
    expected = _float64(name, GROUP, x.double(), [g.double() for g in gradients])
    rule = RULES[name]
    slots = tuple(torch.zeros_like(x) for _ in rule.slots)
    for step, g in enumerate(gradients, start=1):
        x, slots = rule.update(x, g, slots, _fp32(rule.scalars(GROUP, step)))
    assert (x.double() - expected).abs().max().item() < 2e-6


@pytest.mark.parametrize("name", RULES)
def test_zero_learning_rate_keeps_values(name):
    rule = RULES[name]
    x = torch.tensor([1.5, -0.0, 3e38, -1e-40])
    slots = tuple(torch.ones_like(x) for _ in rule.slots)
    moved, _ = rule.update(
        x, torch.ones_like(x), slots, _fp32(rule.scalars(GROUP | {"lr": 0.0}, 3))
    )
    assert same_bits(moved, x)


def test_nesterov_looks_ahead():
    rule = RULES["sgd_momentum"]
    group = GROUP | {"nesterov": True, "dampening": 0.0, "weight_decay": 0.0}
    x, slots = rule.update(
        torch.tensor([1.0]), torch.tensor([2.0]), (torch.zeros(1),), rule.scalars(group, 1)
    )
    assert math.isclose(x.item(), 1.0 - 1e-3 * (2.0 + 0.9 * 2.0), rel_tol=1e-6)


def test_the_first_momentum_is_the_gradient_itself():
    rule = RULES["sgd_momentum"]
    _, (buffer,) = rule.update(
        torch.zeros(1), torch.tensor([4.0]), (torch.tensor([torch.nan]),), rule.scalars(GROUP, 1)
    )
    assert buffer.item() == 4.0


def test_decoupled_decay_goes_past_the_momentum():
    rule = RULES["sgd_momentum"]
    group = GROUP | {"decoupled_weight_decay": True}
    x, (buffer,) = rule.update(
        torch.ones(1), torch.zeros(1), (torch.zeros(1),), rule.scalars(group, 1)
    )
    assert buffer.item() == 0.0
    assert math.isclose(x.item(), 1 - 1e-4, rel_tol=1e-6)


def test_lion_of_nan_is_nan():
    rule = RULES["lion"]
    x, _ = rule.update(
        torch.ones(1), torch.tensor([torch.nan]), (torch.ones(1),), rule.scalars(GROUP, 1)
    )
    assert x.isnan().all()

"""Accuracy over a thousand steps, against the same rule in float64, for each of five seeds.

All gradients are given, none depends on the weights, so that errors are the rounding's alone. Rules
are elementwise, so the seeds run side by side, one a row.
"""

import pytest
import torch

from halfword import SGD, Adam, AdamW, Lion
from helpers import threads

SEEDS, SIZE, STEPS, LR = 5, 300, 1000, 1e-3
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """On a busy machine, threads that share an operation mostly wait for each other."""
    with threads(1):
        yield


def start(dtype):
    """Weights (SEEDS, SIZE) and gradients (STEPS, SEEDS, SIZE), in FP32, exact in ``dtype``."""
    generators = [torch.Generator().manual_seed(seed) for seed in range(SEEDS)]
    weights = torch.stack([torch.randn(SIZE, generator=g) for g in generators])
    gradients = torch.stack([torch.randn(STEPS, SIZE, generator=g) for g in generators], dim=1)
    # As in training, some coordinates see gradients a thousand times smaller than others.
    gradients *= torch.logspace(-3, 0, SIZE)
    return weights.to(dtype).float(), gradients.to(dtype).float()


def trained(make, weights, gradients, dtype):
    """The master weights, in float64, after one step on each gradient."""
    p = torch.nn.Parameter(weights.to(dtype, copy=True))
    opt = make([p])
    for g in gradients:
        p.grad = g.to(dtype)
        opt.step()
    return (opt.master_weight(p) if hasattr(opt, "master_weight") else p.detach()).double()


def assert_as_accurate(found, reference, exact, bound, where=None):
    """For each seed, the root-mean-square error is at most ``bound`` times the reference's."""

    def errors(x):
        return x - exact if where is None else torch.where(where, x - exact, 0.0)

    for seed in range(SEEDS):
        own, theirs = (errors(x)[seed].square().mean().sqrt().item() for x in (found, reference))
        assert own <= bound * theirs, f"seed {seed}: {own:.3g} against {theirs:.3g}"


@DTYPES
@pytest.mark.parametrize(
    ("name", "weight_decay", "bound"),
    [("AdamW", 0.0, 1.01), ("Adam", 0.0, 1.01), ("AdamW", 0.01, 0.2), ("AdamW", 0.1, 0.2)],
)
def test_adam_is_as_accurate_as_torch_and_with_decay_five_times_more(
    name, weight_decay, bound, dtype
):
    """torch multiplies by 1 - lr*wd, rounded: a small bias, the same at every step."""
    weights, gradients = start(dtype)
    settings = {"lr": LR, "weight_decay": weight_decay}
    theirs, ours = getattr(torch.optim, name), {"Adam": Adam, "AdamW": AdamW}[name]
    exact = trained(lambda p: theirs(p, **settings), weights, gradients, torch.float64)
    reference = trained(lambda p: theirs(p, **settings), weights, gradients, torch.float32)
    found = trained(lambda p: ours(p, **settings), weights, gradients, dtype)
    assert_as_accurate(found, reference, exact, bound)


def plain_sgd(x, gradients, momentum, dampening, nesterov, weight_decay, decoupled):
    """The textbook loop in the precision of ``x``, hyper-parameters as Python floats."""
    b = torch.zeros_like(x)
    for step, g in enumerate(gradients):
        g = g.to(x.dtype)
        if not decoupled:
            g = g + weight_decay * x
        b = g if step == 0 else momentum * b + (1 - dampening) * g
        update = g + momentum * b if nesterov else b
        x = x - (LR * update + (LR * weight_decay * x if decoupled else 0))
    return x.double()


@pytest.mark.parametrize(
    ("weight_decay", "decoupled", "dtype"),
    [
        (0.0, False, torch.float32),
        (0.1, False, torch.bfloat16),
        (0.1, True, torch.float32),
        (0.1, True, torch.bfloat16),
    ],
)
@pytest.mark.parametrize(
    ("momentum", "dampening", "nesterov"),
    [(0.0, 0.0, False), (0.9, 0.0, False), (0.9, 0.5, False), (0.9, 0.0, True)],
)
def test_sgd_is_as_accurate_as_a_plain_fp32_loop(
    momentum, dampening, nesterov, decoupled, weight_decay, dtype
):
    weights, gradients = start(dtype)
    rule = (momentum, dampening, nesterov, weight_decay, decoupled)
    exact = plain_sgd(weights.double(), gradients, *rule)
    reference = plain_sgd(weights.float(), gradients, *rule)

    def make(params):
        return SGD(
            params,
            LR,
            momentum,
            dampening,
            weight_decay,
            nesterov,
            decoupled_weight_decay=decoupled,
        )

    found = trained(make, weights, gradients, dtype)
    assert_as_accurate(found, reference, exact, 1.01)


def plain_lion(x, gradients, betas, weight_decay):
    """The published loop in the precision of ``x``; also the sign taken at each step."""
    m, signs = torch.zeros_like(x), []
    for g in gradients:
        g = g.to(x.dtype)
        signs.append(torch.sign(betas[0] * m + (1 - betas[0]) * g))
        x = x - (LR * signs[-1] + LR * weight_decay * x)
        m = betas[1] * m + (1 - betas[1]) * g
    return x.double(), torch.stack(signs)


@DTYPES
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_lion_is_as_accurate_as_a_plain_fp32_loop(weight_decay, dtype):
    """On coordinates whose signs are those of float64: one other sign is worth 2 lr."""
    weights, gradients = start(dtype)
    betas = (0.9, 0.99)
    exact, signs = plain_lion(weights.double(), gradients, betas, weight_decay)
    reference, found_signs = plain_lion(weights.float(), gradients, betas, weight_decay)
    found = trained(
        lambda p: Lion(p, LR, betas, weight_decay=weight_decay), weights, gradients, dtype
    )
    agree = (signs == found_signs.double()).all(dim=0) & ((found - exact).abs() < LR)
    assert agree.double().mean() > 0.95
    assert_as_accurate(found, reference, exact, 1.01, where=agree)

"""Small models with trained optimizers, for saving and restoring."""

from collections.abc import Callable

import pytest
import torch

from halfword import AdamW, Optimizer

Made = tuple[torch.nn.Module, Optimizer]


class Tied(torch.nn.Module):
    """Two uses of one matrix, a bias, a buffer, and an empty parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(16, 8)
        self.head = torch.nn.Linear(8, 16)
        self.head.weight = self.embed.weight
        self.empty = torch.nn.Parameter(torch.zeros(0, 3))
        self.register_buffer("seen", torch.zeros(()))


@pytest.fixture
def make() -> Callable[..., Made]:
    """Return a function that makes a model and its optimizer, trained for some steps."""

    def build(steps: int = 0, reverse: bool = False, **settings: object) -> Made:
        torch.manual_seed(0)
        model = Tied().bfloat16()
        named = list(model.named_parameters())
        groups = [
            {"params": [(n, p) for n, p in named if p.ndim > 1]},
            {"params": [(n, p) for n, p in named if p.ndim < 2], "weight_decay": 0.0},
        ]
        opt = AdamW(groups[::-1] if reverse else groups, **settings)
        train(model, opt, steps)
        return model, opt

    return build


def train(model: torch.nn.Module, opt: Optimizer, steps: int, seed: int = 1) -> None:
    """Take steps on gradients that depend on the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        opt.step()

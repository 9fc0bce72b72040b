"""What all stages share: a module in place of the model, with three methods more."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from halfword.accumulate import Accumulation
from halfword.optimizer import Optimizer


@dataclass(frozen=True)
class Reduction:
    """How gradients are added up over ranks.

    Attributes:
        dtype: of the sums.
        divisor: what they are divided by.
    """

    dtype: torch.dtype
    divisor: int


class Parallel(nn.Module):
    """A model that runs on all ranks of a mesh, or alone; use it in place of the model.

    A loop differs from a plain one in three lines: this in place of the model,
    ``model.attach(optimizer)`` once, and ``model.backward(loss)`` for ``loss.backward()``. Names
    are those of the model itself.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._accumulations: list[Accumulation] = []

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Run the model; all ranks must."""
        return self.module(*inputs, **named)

    def backward(self, loss: Tensor) -> None:
        """Compute gradients, reduced over the ranks, of what ``named_parameters`` gives."""
        loss.backward()  # type: ignore[no-untyped-call]

    def attach(self, optimizer: Optimizer) -> None:
        """Keep the ranks' weights equal to what this optimizer writes."""
        optimizer.register_step_post_hook(lambda *_: self.share_weights())
        optimizer.register_load_state_dict_post_hook(lambda _: self.share_weights())

    def accumulate_in_fp32(self, optimizer: Optimizer) -> Accumulation:
        """Do as the optimizer's own method, but add sums over ranks before they are rounded."""
        handle = optimizer.accumulate_in_fp32()
        others = [each for each in self._accumulations if each is not handle and not each.closed]
        self._accumulations[:] = [*others, handle]
        return handle

    def idle_bytes(self) -> int:
        """Return the bytes that communication keeps and that no gradient is a view of."""
        return 0

    def share_weights(self) -> None:
        """Bring weights that were written through the optimizer to all ranks that need them."""

    def named_parameters(self, *args: Any, **named: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Give what the optimizer is to hold, under the names of the model."""
        return self.module.named_parameters(*args, **named)

    def state_dict(self, *, keep_vars: bool = False) -> dict[str, Any]:  # type: ignore[override]
        """Return the model's state dict, its weights as the optimizer holds them."""
        return self.module.state_dict(keep_vars=keep_vars)

    def load_state_dict(self, state_dict: Any, *args: Any, **named: Any) -> Any:
        """Load a state dict of the model, laid out as ``state_dict`` returns it."""
        return self.module.load_state_dict(state_dict, *args, **named)


def padded_numel(parameter: Tensor, size: int) -> int:
    """Return the elements of the largest part, as ``torch.chunk`` cuts the first dimension."""
    return math.ceil(parameter.shape[0] / size) * math.prod(parameter.shape[1:])

"""FP32 gradient accumulation for parameters whose gradients arrive in BF16."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle


class Accumulation:
    """Buffers that add up gradients in FP32; a handle, as torch's hooks give one.

    A hook adds each gradient to a buffer of the parameter's shape when autograd has finished it,
    and frees it: 4 bytes a parameter while accumulating, whatever the preset. ``Tensor.grad_dtype``
    is not used for this: DistributedDataParallel refuses it and FSDP2 drops it.

    Attributes:
        buffers: the sums so far, by parameter.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.buffers: dict[Tensor, Tensor] = {}
        self.closed = False
        self._offered: dict[Tensor, Tensor] = {}
        self._hooks: dict[Tensor, RemovableHandle] = {}
        self.watch(parameters)

    def watch(self, parameters: Iterable[Tensor]) -> None:
        """Accumulate the gradients of these parameters too, of frozen ones once they are not."""
        for parameter in parameters:
            self._hooks[parameter] = watch(parameter, self.collect)

    def offer(self, parameter: Tensor, gradient: Tensor) -> None:
        """Take a gradient in FP32 for the ``.grad`` that it is then rounded to.

        Whoever adds up gradients over ranks gives what it had before rounding, before the hook is
        called; of a parameter that is not accumulated here nothing is kept.
        """
        if parameter in self._hooks:
            self._offered[parameter] = gradient

    @torch.no_grad()
    def collect(self, parameter: Tensor) -> None:
        """Add a parameter's gradient to its buffer, if there is one, and free it."""
        if parameter.grad is None:
            return
        gradient = self._offered.pop(parameter, parameter.grad)
        if parameter in self.buffers:
            self.buffers[parameter] += gradient  # widened to FP32 element by element
        else:
            self.buffers[parameter] = gradient.to(torch.float32, copy=True)
        parameter.grad = None

    def clear(self) -> None:
        """Free the buffers: the next gradient starts anew."""
        self.buffers.clear()

    def close(self) -> None:
        """Stop accumulating: remove the hooks and free the buffers. Closing twice is harmless."""
        self.closed = True
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        self.clear()


def watch(parameter: Tensor, hook: Callable[[Tensor], None]) -> RemovableHandle:
    """Call a hook with a parameter whenever it has got a gradient, also if it is frozen for now."""
    frozen = not parameter.requires_grad
    parameter.requires_grad_(True)  # torch registers no hook on a frozen tensor
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    parameter.requires_grad_(not frozen)
    return handle

"""Gradient release: a parameter is updated when its gradient is complete, which is then freed."""

import contextlib
import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Self

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from halfword.clip import clip_coefficient, total_norm

GLOBAL_CLIPPING = (
    "clip_grad_norm: needs all gradients, which are released one by one; clip each parameter's by "
    "release_gradients(max_norm=...)"
)


class Release:
    """A handle of ``Optimizer.release_gradients``, as torch's hooks give one.

    Gradients of all parameters are never held at once: 2 bytes a parameter less in BF16. (As LOMO
    does for SGD: Lv et al., arXiv:2306.09782.)

    Attributes:
        max_norm: what each parameter's gradient is clipped to; None neither clips nor measures.
        closed: whether gradients are kept until ``step`` again.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        update: Callable[[Tensor, "Release", bool], None],
        max_norm: float | None,
    ) -> None:
        self.max_norm = max_norm
        self.closed = False
        self._update = update
        self._held = False
        self._pass = -1
        self._squares = 0.0
        self._hooks: list[RemovableHandle] = []
        self.watch(parameters)

    def watch(self, parameters: Iterable[Tensor]) -> None:
        """Release the gradients of these parameters too, of frozen ones once they are not."""
        # Parameters outlive optimizers: one that is let go must not go on stepping.
        handle = weakref.ref(self)

        def arrived(parameter: Tensor) -> None:
            release = handle()
            if release is not None and not release._held:
                release.update(parameter, is_fresh=release._is_same_pass())

        for parameter in parameters:
            frozen = not parameter.requires_grad
            parameter.requires_grad_(True)  # torch registers no hook on a frozen tensor
            hook = parameter.register_post_accumulate_grad_hook(arrived)  # type: ignore[no-untyped-call]
            self._hooks.append(hook)
            parameter.requires_grad_(not frozen)

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Keep the gradients of backward passes inside: micro-batches before the last one.

        Gradients have to be held until the last micro-batch, so there is less to release.
        """
        before, self._held = self._held, True
        try:
            yield
        finally:
            self._held = before

    def update(self, parameter: Tensor, *, is_fresh: bool) -> None:
        """Update a parameter that has a gradient, now, and free the gradient.

        Args:
            parameter: of the optimizer.
            is_fresh: whether the optimizer has looked since whatever may have changed.
        """
        self._update(parameter, self, is_fresh)

    def _is_same_pass(self) -> bool:
        """Whether the backward pass that runs is the one of the last call."""
        before, self._pass = self._pass, torch._C._current_graph_task_id()
        return before == self._pass != -1

    def total_norm(self) -> Tensor:
        """Return the 2-norm over all gradients released since the last call, before clipping.

        Returns:
            A 0-dim float64 tensor on the CPU; 0 where ``max_norm`` is None.
        """
        norm, self._squares = math.sqrt(self._squares), 0.0
        return torch.tensor(norm, dtype=torch.float64)

    def close(self) -> None:
        """Keep gradients until ``step`` again. Closing twice is harmless."""
        self.closed = True
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def clip(self, gradient: Tensor) -> float:
        """Return the coefficient for a gradient, whose norm is counted in ``total_norm``."""
        if self.max_norm is None:
            return 1.0
        norm = total_norm([gradient]).cpu()
        self._squares += norm.item() ** 2
        return float(clip_coefficient(norm, self.max_norm))


def check_release(
    open_one: Release | None,
    on_nonfinite: str,
    pending_coefficient: float | Tensor,
    max_norm: float | None,
) -> None:
    """Raise ValueError for what decides over all gradients at once, and for a negative norm."""
    if open_one is not None:
        raise ValueError("release_gradients: is on already; close its handle first")
    if on_nonfinite != "propagate":
        raise ValueError(
            f"on_nonfinite={on_nonfinite!r}: needs all gradients, which are released one by one; "
            "use on_nonfinite='propagate'"
        )
    if pending_coefficient != 1.0:
        raise ValueError(
            "release_gradients: clip_grad_norm has clipped a step that is not taken yet; call "
            "step() first, and clip each parameter's gradient by release_gradients(max_norm=...)"
        )
    if max_norm is not None and not max_norm >= 0:
        raise ValueError(f"max_norm={max_norm}: must be at least 0")

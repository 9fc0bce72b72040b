"""Numbers that the Triton backend keeps on the device."""

from array import array
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_CAPTURED: list[tuple[Tensor, Tensor]] = []
"""What graphs send and where to: they may be replayed as long as the process lives."""


class Table:
    """Numbers kept on the device, sent there only when they change, and without waiting.

    A graph sends the numbers of its capture again at each replay, from the memory that they were
    sent from; memory for that is set aside at the last change before, since a capture cannot.
    """

    def __init__(self, dtype: torch.dtype, in_graphs: bool = True) -> None:
        self._dtype = dtype
        self._in_graphs = in_graphs
        self._made_of: Any = None
        self._tensor = torch.empty(0)
        self._spare: Tensor | None = None

    def on(
        self,
        device: torch.device,
        numbers: "array[Any]",
        made: Callable[[Tensor], Tensor] = lambda numbers: numbers,
    ) -> Tensor:
        """Return what is made of the numbers as a tensor on ``device``.

        Raises:
            RuntimeError: they changed in a capture, and no memory was set aside for it.
        """
        # By their bits: 0.0 and -0.0 differ. On another stream the last kernel may still read.
        made_of = numbers.tobytes(), device, stream_of(device)
        if made_of != self._made_of:
            read = torch.frombuffer(bytearray(made_of[0]), dtype=self._dtype)
            self._tensor = self._sent(made(read), device)
            self._made_of = made_of
        return self._tensor

    def _sent(self, numbers: Tensor, device: torch.device) -> Tensor:
        if device.type == "cpu":
            return numbers
        if not is_capturing(device):
            self._spare = torch.empty_like(numbers, pin_memory=True) if self._in_graphs else None
            return numbers.pin_memory().to(device, non_blocking=True)
        if self._spare is None or self._spare.numel() != numbers.numel():
            raise RuntimeError("take the same step once before it is captured in a graph")
        source, self._spare = self._spare.copy_(numbers), None
        sent = source.to(device, non_blocking=True)
        _CAPTURED.append((source, sent))
        return sent


class Tables:
    """All that a batch has on the device, see triton_source.py and triton_clock.py."""

    def __init__(self) -> None:
        self.rows = Table(torch.int64)
        self.scalars = Table(torch.float64, in_graphs=False)
        self.full = Table(torch.int64)
        self.rest = Table(torch.int64)
        self.clocks = Table(torch.int64)
        self._room: tuple[Any, Tensor] | None = None

    def room(self, count: int, device: torch.device) -> Tensor:
        """Return room for ``count`` scalars that a clock writes and the update reads."""
        made_for = count, device, stream_of(device)
        if self._room is None or self._room[0] != made_for:
            self._room = made_for, torch.empty(count, dtype=torch.float64, device=device)
        return self._room[1]


def stream_of(device: torch.device) -> int:
    """Return the number of the current stream."""
    return 0 if device.type == "cpu" else torch.accelerator.current_stream(device).stream_id


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream is being captured in a graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()

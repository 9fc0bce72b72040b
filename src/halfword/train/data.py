"""From tokens to batches: packed sequences in a seeded order, and windows over held-out text."""

import functools
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from halfword.errors import UsageError

Batch = tuple[Tensor, Tensor]  # inputs and targets, both (batch, seq) int64


class PackedSequences:
    """Sequence i is tokens [i*T, i*T + T] in one seeded order that never ends.

    Its T inputs are all but the last of these T + 1 tokens, its T targets all but the first.
    Number k of the order is item k % n of epoch k // n's permutation of the n sequences: a pure
    function of (seed, k), so that a run can go on from a count alone.
    """

    def __init__(self, tokens: Tensor, seq_length: int, seed: int) -> None:
        self.tokens = tokens  # (tokens,) uint8 or int32
        self.seq_length = seq_length
        self.seed = seed
        self.num_sequences = (len(tokens) - 1) // seq_length
        if self.num_sequences < 1:
            fix = f"too long for the training text, which has {len(tokens)} tokens"
            raise UsageError("--seq_length", seq_length, fix)

    def micro_batch(self, number: int, batch_size: int) -> Batch:
        """Give sequences [number*batch_size, (number+1)*batch_size) of the order."""
        first = number * batch_size
        return _pair([self._sequence(k) for k in range(first, first + batch_size)])

    def _sequence(self, number: int) -> Tensor:
        epoch, position = divmod(number, self.num_sequences)
        order = _permutation(self.num_sequences, self.seed, epoch)
        start = int(order[position]) * self.seq_length
        return self.tokens[start : start + self.seq_length + 1]


class EvalWindows:
    """Held-out tokens in windows that do not overlap; each token but the first is one target."""

    def __init__(self, tokens: Tensor, seq_length: int, batch_size: int) -> None:
        self.tokens = tokens  # (tokens,) uint8 or int32
        self.seq_length = seq_length
        self.batch_size = batch_size
        if len(tokens) < 2:
            of = f"of {len(tokens)} tokens"
            raise UsageError("--eval_data", of, "too short to evaluate on; give a longer text")

    def __iter__(self) -> Iterator[Batch]:
        """Give full windows in batches, then the shorter one at the end, if there is one."""
        size = self.seq_length
        starts = range(0, len(self.tokens) - size, size)
        for first in range(0, len(starts), self.batch_size):
            batch = starts[first : first + self.batch_size]
            yield _pair([self.tokens[start : start + size + 1] for start in batch])
        tail = self.tokens[len(starts) * size :]
        if len(tail) > 1:
            yield _pair([tail])


def _pair(sequences: list[Tensor]) -> Batch:
    batch = torch.stack(sequences).long()  # (batch, seq + 1)
    return batch[:, :-1].contiguous(), batch[:, 1:].contiguous()


@functools.lru_cache(maxsize=2)  # a batch may span two epochs
def _permutation(length: int, seed: int, epoch: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.random.default_rng([seed, epoch]).permutation(length)

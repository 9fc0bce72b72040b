"""The order of sequences, and the windows that are evaluated on."""

import pytest
import torch
from torch import Tensor

from halfword.errors import UsageError
from halfword.train.data import EvalWindows, PackedSequences

SEQ_LENGTH = 5


def make_sequences(num_sequences: int, seed: int = 0) -> PackedSequences:
    return PackedSequences(torch.arange(num_sequences * SEQ_LENGTH + 3), SEQ_LENGTH, seed)


def ids(inputs: Tensor) -> list[int]:
    """Tokens count up from 0, so that an input's first one tells its sequence."""
    return (inputs[:, 0] // SEQ_LENGTH).tolist()


def test_targets_are_inputs_shifted_by_one() -> None:
    inputs, targets = make_sequences(7).micro_batch(0, 4)
    assert inputs.shape == targets.shape == (4, SEQ_LENGTH)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(targets, inputs + 1)


def test_each_epoch_gives_every_sequence_once_in_an_order_of_its_own() -> None:
    sequences = make_sequences(11)
    order = ids(torch.cat([sequences.micro_batch(number, 1)[0] for number in range(33)]))
    epochs = [order[:11], order[11:22], order[22:]]
    assert all(sorted(epoch) == list(range(11)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


@pytest.mark.parametrize("batch_size", [1, 3, 4, 25])
def test_the_order_does_not_depend_on_the_batch_size(batch_size: int) -> None:
    """Micro-batch k is sequences [k*B, (k+1)*B), across the ends of epochs too."""
    sequences = make_sequences(10)
    one_by_one = ids(torch.cat([sequences.micro_batch(number, 1)[0] for number in range(50)]))
    batches = [sequences.micro_batch(number, batch_size)[0] for number in range(50 // batch_size)]
    order = ids(torch.cat(batches))
    assert order == one_by_one[: len(order)]


def test_a_batch_can_be_had_again_from_its_number_alone() -> None:
    """A resumed run knows only how many micro-batches there were (accelerate#2016)."""
    first = make_sequences(10)
    uninterrupted = [ids(first.micro_batch(number, 4)[0]) for number in range(20)]
    for stopped_at in (0, 1, 3, 7, 19):  # in epoch 0, in its last batch, in later epochs
        resumed = make_sequences(10)
        assert ids(resumed.micro_batch(stopped_at, 4)[0]) == uninterrupted[stopped_at]


def test_the_seed_decides_the_order() -> None:
    order = ids(make_sequences(30, seed=1).micro_batch(0, 30)[0])
    assert order == ids(make_sequences(30, seed=1).micro_batch(0, 30)[0])
    assert order != ids(make_sequences(30, seed=2).micro_batch(0, 30)[0])


def test_text_too_short_for_one_sequence_is_refused() -> None:
    assert PackedSequences(torch.arange(SEQ_LENGTH + 1), SEQ_LENGTH, 0).num_sequences == 1
    message = r"^--seq_length 5: too long for the training text, which has 5 tokens$"
    with pytest.raises(UsageError, match=message):
        PackedSequences(torch.arange(SEQ_LENGTH), SEQ_LENGTH, 0)


@pytest.mark.parametrize("num_tokens", [2, 5, 6, 7, 11, 40, 41, 42, 63])
@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_windows_predict_every_held_out_token_but_the_first_once(num_tokens, batch_size) -> None:
    windows = list(EvalWindows(torch.arange(num_tokens), SEQ_LENGTH, batch_size))
    targets = torch.cat([targets.flatten() for _, targets in windows])
    assert targets.tolist() == list(range(1, num_tokens))
    for inputs, targets in windows:
        assert torch.equal(targets, inputs + 1)
        assert len(inputs) <= batch_size


def test_held_out_text_without_a_target_is_refused() -> None:
    with pytest.raises(UsageError, match=r"^--eval_data of 1 tokens: too short to evaluate on"):
        EvalWindows(torch.arange(1), SEQ_LENGTH, 4)

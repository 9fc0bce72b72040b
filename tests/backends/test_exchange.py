"""What C++ sees of tensors, against what Python is told by each."""

import pytest
import torch

from halfword.backends import native
from halfword.backends.exchange import WORDS, Exchange

DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64),
    *(torch.int8, torch.uint8, torch.int16, torch.int32),
)


@pytest.fixture
def exchange() -> Exchange:
    if reason := native.unavailable():
        pytest.skip(reason)
    return native.library().exchange


def kind(exchange, tensor):
    return exchange.see([tensor])[2]


def test_addresses_and_elements_are_those_that_python_is_told(exchange):
    whole = torch.zeros(6, 4, dtype=torch.bfloat16)
    tensors = [whole, whole[1:], whole.t(), whole[:, 1], torch.zeros(()), torch.zeros(3, 0, 2)]
    tensors.append(torch.nn.Parameter(torch.zeros(5)))
    words = exchange.see(tensors)
    assert words[::WORDS].tolist() == [tensor.data_ptr() for tensor in tensors]
    assert words[1::WORDS].tolist() == [tensor.numel() for tensor in tensors]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(4, 3),
        torch.zeros(4, 3).t(),
        torch.zeros(4, 3)[:, 1],
        torch.zeros(4, 3)[:, :1],
        torch.zeros(1, 3).t(),
        torch.zeros(4, 1)[::2],
        torch.zeros(2, 1, 3).expand(2, 4, 3),
        torch.zeros(0, 3).t(),
        torch.zeros(()),
    ],
    ids=lambda tensor: f"{tuple(tensor.shape)}-{tensor.stride()}",
)
def test_contiguous_is_what_torch_calls_so(exchange, tensor):
    contiguous = kind(exchange, torch.zeros(5))
    assert (kind(exchange, tensor) == contiguous) == tensor.is_contiguous()


def test_no_two_dtypes_look_alike(exchange):
    kinds = [kind(exchange, torch.zeros(2, dtype=dtype)) for dtype in DTYPES]
    assert len(set(kinds)) == len(DTYPES)


def test_a_storage_that_was_freed_in_place_shows(exchange):
    tensor = torch.zeros(4)
    before = kind(exchange, tensor)
    tensor.untyped_storage().resize_(0)
    assert kind(exchange, tensor) != before


def test_nothing_is_seen_where_one_has_no_memory(exchange):
    sparse = torch.zeros(3, 3).to_sparse()
    assert not exchange.see([torch.zeros(2), sparse])
    assert not exchange.see([torch.zeros(2, device="meta")])
    assert exchange.see([torch.zeros(2)])

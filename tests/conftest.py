"""What all tests share: poisoned allocations, and one thread."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _poison_uninitialized_memory():
    """Fill `torch.empty` with NaN, so that an output that nobody wrote shows."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _one_thread():
    """Tensors here are small, and threads that wait for a busy core cost more than they bring."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)

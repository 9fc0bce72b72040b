"""What all tests share: poisoned allocations and a quiet, deterministic torch."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _poison_uninitialized_memory():
    """Fill `torch.empty` with NaN, so that an output that nobody wrote shows."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)

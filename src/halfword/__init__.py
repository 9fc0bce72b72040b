"""halfword: train in BF16, keep every bit of FP32."""

from halfword.algorithms import SGD, Adam, AdamW, Lion
from halfword.masters import fp32_state_dict, load_fp32_state_dict
from halfword.memory import Memory
from halfword.optimizer import Optimizer

__version__ = "0.1.0"

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "Lion",
    "Memory",
    "Optimizer",
    "fp32_state_dict",
    "load_fp32_state_dict",
]

"""halfword: train in BF16, keep every bit of FP32."""

from halfword.algorithms import SGD, Adam, AdamW, Lion
from halfword.diagnostics import Diagnostics
from halfword.masters import fp32_state_dict, load_fp32_state_dict
from halfword.memory import Memory
from halfword.optimizer import Optimizer
from halfword.release import Release

__version__ = "0.1.0"

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "Diagnostics",
    "Lion",
    "Memory",
    "Optimizer",
    "Release",
    "fp32_state_dict",
    "load_fp32_state_dict",
]

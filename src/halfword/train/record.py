"""What a run's files say of where it ran and of what it made."""

import hashlib
import platform
import resource
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import halfword
from halfword.train.matmul import native_bf16_matmul
from halfword.train.metrics import Row


def versions() -> dict[str, str]:
    """Name the software that decides the bits."""
    return {
        "halfword": halfword.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,  # its permutations are the data's order
        "python": platform.python_version(),
    }


def describe(device: torch.device, threads: int) -> dict[str, Any]:
    """Name the hardware that decides the bits."""
    capabilities = torch.cpu.get_capabilities()
    name = capabilities.get("cpu_name") or platform.machine()
    if device.type != "cpu":
        name = torch.get_device_module(device).get_device_name(device)
    return {
        "kind": device.type,
        "name": name,
        "flags": sorted(flag for flag, value in capabilities.items() if value is True),
        "threads": threads,
        "bf16_matmul": "native" if native_bf16_matmul(device.type) else "fp32 upcast",
    }


def digest(model: nn.Module, values: Callable[[Tensor], Tensor]) -> str:
    """Hash a value of each parameter, in the order of their names, a tied one once.

    All NaNs count as equal, as everywhere in halfword: they differ in bits that mean nothing.
    """
    sha256 = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        value = values(parameter).detach().cpu().contiguous()
        value = torch.where(value.isnan(), torch.nan, value)
        sha256.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        sha256.update(value.view(torch.uint8).numpy().tobytes())
    return sha256.hexdigest()


def results(rows: Sequence[Row], warmup_steps: int, eval_loss: float | None) -> dict[str, Any]:
    """Put all steps in a few numbers; times are those after the first `warmup_steps`."""
    losses = [row.loss for row in rows]
    timed = rows[warmup_steps:]
    return {
        "steps": len(rows),
        "tokens": sum(row.tokens for row in rows),
        "final_loss": losses[-1] if rows else None,
        "mean_loss": float(np.mean(losses)) if rows else None,
        "loss_std": float(np.std(losses)) if rows else None,
        "eval_loss": eval_loss,
        "step_s_median": statistics.median(row.step_s for row in timed) if timed else None,
        "optimizer_s_median": (
            statistics.median(row.optimizer_s for row in timed) if timed else None
        ),
        "tokens_per_s": (
            sum(row.tokens for row in timed) / sum(row.step_s for row in timed) if timed else None
        ),
    }


def peak_rss_bytes() -> int:
    """Give the most memory that this process has held so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024

"""Where benchmark results go, and what each row says of the machine that made it."""

import json
import subprocess
from pathlib import Path
from typing import Any

import torch

from halfword.train.record import describe, versions

RESULTS = Path(__file__).parent / "results"


def environment(on: torch.device | str = "cpu") -> dict[str, Any]:
    """Return versions, device and commit."""
    device = describe(torch.device(on), torch.get_num_threads())
    del device["flags"]
    return {"versions": versions(), "device": device, "commit": commit()}


def commit() -> str | None:
    """Return the commit that is checked out, where git knows."""
    git = ["git", "rev-parse", "--short", "HEAD"]
    found = subprocess.run(git, capture_output=True, text=True, cwd=RESULTS.parent)
    return found.stdout.strip() or None


def write(path: Path, result: dict[str, Any]) -> None:
    """Write a result file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")

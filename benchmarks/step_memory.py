"""What each preset holds, and how far a step goes beyond it, counted by torch's own allocator.

    python benchmarks/step_memory.py

A stack of matrices with almost no activations takes a backward pass and a step. *Held* is what
lives at the entry of `step()`, by storage, beside the arithmetic of the formats. *Peak* is the most
that the allocator had handed out during backward and step beyond weights and states: gradients,
what the optimizer makes for itself, and some kilobytes of activations. Writes
benchmarks/results/step-memory.json; fails where a bar is missed.
"""

import sys
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from halfword import AdamW
from halfword.formats import MASTER_WEIGHTS
from halfword.rules import RULES
from halfword.settings import slot_formats
from halfword.train.config import PRESETS, RELEASED, Precision
from results import RESULTS, environment, write

HELD_BARS: dict[Precision, float] = {"lean": 8.2, "leanest": 5.2}  # bytes a parameter
WIDTH, LAYERS = 1024, 12
LARGEST = 4 * WIDTH * WIDTH  # elements of the widest matrix
ALLOWANCE = 1 << 20  # bytes for a tile and the activations


class Stack(nn.Module):
    """Square matrices, one that is four times as large, and a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        self.norm = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a scalar loss of one row."""
        for layer in self.layers:
            x = x + layer(x)
        return self.large(x * self.norm).float().square().mean()


def main() -> int:
    """Measure every preset, write the results, and return the exit code."""
    rows = [measure(preset) for preset in PRESETS]
    write(RESULTS / "step-memory.json", {**environment(), "results": rows})
    missed = False
    for row in rows:
        is_missed = row["held"] > row.get("held_bar", row["held"]) or row["peak"] > row["peak_bar"]
        missed |= is_missed
        print(
            f"{row['preset']:12} held {row['held']:6.3f} bytes a parameter ({row['arithmetic']}), "
            f"peak {row['peak'] / 2**20:6.2f} of at most {row['peak_bar'] / 2**20:.2f} MiB"
            + ("  MISSED" if is_missed else "")
        )
    return int(missed)


def measure(preset: Precision) -> dict[str, Any]:
    """Return what a preset holds and needs for a step."""
    torch.manual_seed(0)
    model = Stack().bfloat16()
    opt = AdamW(model.named_parameters(), **PRESETS[preset]._asdict())
    released = preset in RELEASED
    if released:
        opt.release_gradients()
    x = torch.randn(1, WIDTH).bfloat16()
    held = 0.0

    def step() -> None:
        nonlocal held
        model(x).backward()
        held = opt.memory().bytes_per_parameter
        opt.step()
        opt.zero_grad()

    step()  # what is made once
    peak = peak_bytes(step)
    gradients = 2 * sum(parameter.numel() for parameter in model.parameters())
    row = {
        "preset": preset,
        "arithmetic": arithmetic(preset),
        "held": held,
        "peak": peak,
        "peak_bar": (2 * 2 * LARGEST if released else gradients) + ALLOWANCE,
        "num_parameters": gradients // 2,
    }
    return row | ({"held_bar": HELD_BARS[preset]} if preset in HELD_BARS else {})


def peak_bytes(step: Any) -> int:
    """Return the most bytes alive at once, of those that were allocated while ``step`` ran."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step()
    alive = peak = 0
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak


def arithmetic(preset: Precision) -> str:
    """Return the bytes a parameter of a preset as a sum: weight, master, moments, gradient."""
    formats = PRESETS[preset]
    weight = MASTER_WEIGHTS[torch.bfloat16][formats.master_weights]
    moments = slot_formats(formats.moments, RULES["adamw"], torch.Size([WIDTH, WIDTH]))
    gradient = 0 if preset in RELEASED else 2
    parts = 2, weight.bytes_per_element - 2, sum(m.bytes_per_element for m in moments), gradient
    return f"{' + '.join(f'{part:g}' for part in parts)} = {sum(parts):g}"


if __name__ == "__main__":
    sys.exit(main())

"""Candidates for moments in 8 bits, on the gradients of a real training run.

A small GPT trains on the embedded text with exact moments (AdamW, beta2 = 0.999). Beside it each
candidate code keeps one of the two moments of the same gradients, the other being exact; all are
compared with float64. After training the gradients go on a tenth as large, and those of every 64th
coordinate are zero: what follows, and what stays behind?

    python benchmarks/moment_codes.py [--steps 500] [--threads 2]

Writes benchmarks/results/moment_codes.json, the source of docs/decisions/0007-8-bit-moments.md.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from halfword import noise
from halfword.formats import FORMATS, Format
from halfword.train.config import TrainConfig
from halfword.train.loop import train_step
from halfword.train.training import Training, build
from results import RESULTS, environment, write

BETA1, BETA2 = 0.9, 0.999
WIDTH = 128  # columns that are watched, of at most ROWS rows of each matrix
ROWS = 16
REPLAYED = 50  # gradients that the steps after training take, over and over

Quantizer = Callable[[Tensor, int], Tensor]  # (moment, step) -> what its code keeps of it


@dataclass
class Arm:
    """One moment in one code, beside exact ones."""

    name: str
    slot: str
    quantizer: Quantizer
    moment: Tensor
    measured: dict[str, float] = field(default_factory=dict)


def main() -> None:
    """Run the study."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--fall_steps", type=int, default=1000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, default=RESULTS / "moment_codes.json")
    arguments = parser.parse_args()
    training = build(
        TrainConfig(
            precision="fp32-master",
            num_layers=2,
            hidden_dim=128,
            seq_length=64,
            batch_size=8,
            num_steps=arguments.steps,
            beta2=BETA2,
            max_grad_norm=0.0,
            threads=arguments.threads,
        )
    )
    study = Study(training)
    for step in range(arguments.steps):
        train_step(training, step)
    study.measure("trained")
    study.let_gradients_fall(arguments.fall_steps)
    study.measure("fallen")
    rows = [{"code": arm.name, "slot": arm.slot, **arm.measured} for arm in study.arms]
    settings = {"steps": arguments.steps, "fall_steps": arguments.fall_steps}
    result = {"benchmark": "moment_codes", **environment(), "settings": settings}
    write(arguments.output, {**result, "spread": study.spread, "results": rows})
    for row in rows:
        figures = "  ".join(f"{name} {row[name]:.4f}" for name in list(row)[2:])
        print(f"{row['slot']:10} {row['code']:44} {figures}")


class Study:
    """All arms, fed with the gradients of a training run."""

    def __init__(self, training: Training) -> None:
        self._matrices = [p for p in training.model.parameters() if p.dim() == 2]
        training.optimizer.register_step_pre_hook(lambda *_: self._take(self._gradient()))
        shape = torch.cat([_watched(p) for p in self._matrices]).shape  # (rows, WIDTH)
        self._exact = {slot: torch.zeros(shape, dtype=torch.float64) for slot in SLOTS}
        self.arms = [
            Arm(name, slot, quantizer, torch.zeros(shape))
            for slot in SLOTS
            for name, quantizer in candidates(slot).items()
        ]
        self.spread: dict[str, list[float]] = {}
        self._step = 0
        self._recent: list[Tensor] = []

    def let_gradients_fall(self, steps: int) -> None:
        """Go on with gradients a tenth as large, none in every 64th coordinate."""
        recent = self._recent
        for step in range(steps):
            gradient = 0.1 * recent[step % len(recent)]
            gradient[:, ::64] = 0.0
            self._take(gradient)

    def measure(self, when: str) -> None:
        """Compare all arms with the exact moments."""
        m, v = self._exact.values()
        update = _update(m, v)
        trained = update.square().mean(1) > 1e-6  # rows that have had gradients for some time
        if when == "trained":
            for slot, moment in self._exact.items():
                ratio = moment[trained].abs().view(-1, 64)
                ratio = (ratio / ratio.amax(1, keepdim=True)).flatten().sort().values
                places = (len(ratio) * torch.tensor([0.001, 0.01, 0.1, 0.5])).long()
                self.spread[slot] = ratio[places].log2().tolist()
        for arm in self.arms:
            mine = arm.moment.double()
            found = _update(mine, v) if arm.slot == "exp_avg" else _update(m, mine)
            error = (found - update)[trained].square().mean().sqrt()
            arm.measured[f"{when}_update_error"] = (
                error / update[trained].square().mean().sqrt()
            ).item()
            if arm.slot == "exp_avg_sq":
                ratio = (mine / v)[trained & (v.amin(1) > 0)]
                arm.measured[f"{when}_ratio_mean"] = ratio.mean().item()
                arm.measured[f"{when}_ratio_deviation"] = ratio.std().item()
            elif when == "fallen":  # as a multiple of what an update is elsewhere
                rest = found[trained][:, ::64].abs().mean() / found[trained].abs().mean()
                arm.measured["fallen_left_at_rest"] = rest.item()

    def _gradient(self) -> Tensor:
        return torch.cat([_watched(p.grad).float() for p in self._matrices if p.grad is not None])

    def _take(self, gradient: Tensor) -> None:
        self._step += 1
        self._recent = [*self._recent[1 - REPLAYED :], gradient.clone()]
        wide = gradient.double()
        self._exact["exp_avg"] += (1 - BETA1) * (wide - self._exact["exp_avg"])
        self._exact["exp_avg_sq"] += (1 - BETA2) * (wide.square() - self._exact["exp_avg_sq"])
        for arm in self.arms:
            if arm.slot == "exp_avg":
                moment = arm.moment + (1 - BETA1) * (gradient - arm.moment)
            else:
                moment = BETA2 * arm.moment + (1 - BETA2) * gradient.square()
            arm.moment = arm.quantizer(moment, self._step)


SLOTS = ("exp_avg", "exp_avg_sq")


def candidates(slot: str) -> dict[str, Quantizer]:
    """Return the codes of one slot: 127 levels and a sign, or 255 levels."""
    if slot == "exp_avg":
        return {
            "halfword int8": _format(FORMATS["int8"]),
            "bf16-sr": _format(FORMATS["bf16-sr"]),
            "multiples, block of 32": _levels(_power(127, 1), 32),
            "multiples": _levels(_power(127, 1), 64),
            "multiples, block of 128": _levels(_power(127, 1), 128),
            "multiples, nearest": _levels(_power(127, 1), 64, stochastic=False),
            "multiples, scale a power of two": _levels(_power(127, 1), 64, octave=True),
            "float, 8 octaves of 16": _levels(_float(7, 16), 64, octave=True),
            "float, 4 octaves of 32": _levels(_float(3, 32), 64, octave=True),
            "octaves from 1, 4 of 32": _levels(_octaves(4, 32), 64),
            "dynamic tree": _levels(_tree(128), 64),
        }
    return {
        "halfword uint8": _format(FORMATS["uint8"]),
        "bf16-sr": _format(FORMATS["bf16-sr"]),
        "multiples": _levels(_power(255, 1), 64),
        "squares": _levels(_power(255, 2), 64),
        "fourth powers": _levels(_power(255, 4), 64),
        "float, 8 octaves of 32": _levels(_float(7, 32), 64, octave=True),
        "float, 16 octaves of 16": _levels(_float(15, 16), 64, octave=True),
        "octaves from 1, 16 of 16": _levels(_octaves(16, 16), 64),
        "octaves from 1, 8 of 32, block of 32": _levels(_octaves(8, 32), 32),
        "octaves from 1, 8 of 32": _levels(_octaves(8, 32), 64),
        "octaves from 1, 8 of 32, block of 128": _levels(_octaves(8, 32), 128),
        "octaves from 1, 8 of 32, nearest": _levels(_octaves(8, 32), 64, stochastic=False),
        "octaves from 1, 4 of 64": _levels(_octaves(4, 64), 64),
        "dynamic tree": _levels(_tree(256), 64),
    }


def _format(format: Format) -> Quantizer:
    """Return what a format of halfword does."""

    def quantize(x: Tensor, step: int) -> Tensor:
        bits = noise.bits(noise.key(noise.stream(0, 0, format.name), step), 0, x.numel())
        return format.decode(format.encode(x.reshape(-1), bits)).view(x.shape)

    return quantize


def _levels(levels: Tensor, block: int, stochastic: bool = True, octave: bool = False) -> Quantizer:
    """Return rounding to ``levels``, ascending from 0, times the scale of each block and a sign.

    Args:
        levels: (n,) fp32.
        block: elements that share a scale.
        stochastic: else to nearest.
        octave: the scale is a power of two, else the largest comes out as the last level.
    """

    def quantize(x: Tensor, step: int) -> Tensor:
        rows = x.reshape(-1, block)
        scale = rows.abs().amax(1, keepdim=True) / levels[-1]
        scale = torch.exp2(torch.ceil(torch.log2(scale))) if octave else scale
        y = rows.abs() / torch.where(scale > 0, scale, 1.0)
        below = (torch.bucketize(y, levels, right=True) - 1).clamp(0, len(levels) - 2)
        part = (y - levels[below]) / (levels[below + 1] - levels[below])
        code = below + (part > (torch.rand_like(part) if stochastic else 0.5))
        code = torch.maximum(code, (x.reshape(-1, block) > 0) & (len(levels) > 128))
        return (levels[code] * scale * rows.sign()).view(x.shape)

    return quantize


def _power(top: int, exponent: int) -> Tensor:
    return torch.arange(top + 1.0) ** exponent


def _float(octaves: int, steps: int) -> Tensor:
    """Levels of a small float: equal steps up to 1, then octaves of as many each."""
    place = torch.arange(steps) / steps
    return torch.cat([place, *(2.0**octave * (1 + place) for octave in range(octaves))])


def _octaves(octaves: int, steps: int) -> Tensor:
    """Levels that 1 is added to, so that all octaves have steps alike."""
    place = torch.arange(steps) / steps
    return torch.cat([2.0**octave * (1 + place) - 1 for octave in range(octaves)])


def _tree(count: int) -> Tensor:
    """Decades with half as many levels each further down (in the manner of arXiv:2110.02861)."""
    decades = [
        10.0**-d * (0.1 + 0.9 * (torch.arange(count >> d + 1) + 0.5) / (count >> d + 1))
        for d in range(7)
    ]
    return torch.cat([torch.zeros(1), *reversed(decades)])


def _watched(matrix: Tensor) -> Tensor:
    return matrix.detach()[:ROWS, :WIDTH]


def _update(m: Tensor, v: Tensor) -> Tensor:
    return m / (v.sqrt() + 1e-8)


if __name__ == "__main__":
    main()

"""The optimizer step on a GPU beside its peers and beside a plain copy of as many bytes.

All arms take turns in one run. A step's bytes are those that it has to read and write: each plane
twice, the gradient once. The copy moves as many, so its time is what the memory allows. Peers:
torch's fused AdamW in FP32 (with the cast to BF16 weights) and in BF16; FlashOptim, Transformer
Engine and torchao where they are installed, each as its own page says to use it.

    python benchmarks/step_gpu.py [--parameters 67108864] [--small 2000] [--rounds 50]

Writes benchmarks/results/step-gpu.json. Measures nothing where a step differs from the CPU
backend's; fails where a goal is missed.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import Parameter

from halfword import AdamW
from results import RESULTS, environment, write

COMBINATIONS = {
    "split + fp32": ("split", "fp32"),
    "split + bf16-sr": ("split", "bf16-sr"),
    "split24 + bf16-sr": ("split24", "bf16-sr"),
    "bf16 + bf16": ("bf16", "bf16"),
    "bf16-sr + bf16-sr": ("bf16-sr", "bf16-sr"),
    "fp32 + fp32": ("fp32", "fp32"),
}
COPY = "copy"
BANDWIDTH_GOAL, SMALL_GOAL = 0.90, 1.5  # of the copy's; of one tensor's time

Step = Callable[[], Any]
Arm = tuple[Step, int | None]  # and the bytes that it moves, where they are known
REPEATS = 10  # steps that one time is taken of, so that the device never waits for Python


def main() -> int:
    """Run the benchmark and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=int, default=64 << 20)
    parser.add_argument("--small", type=int, default=2000, help="number of 64 x 64 tensors")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--output", type=Path, default=RESULTS / "step-gpu.json")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("needs a CUDA device")
    check_bits()
    rows = one_tensor(arguments.parameters, arguments.rounds)
    rows += small_tensors(arguments.small, arguments.rounds)
    settings = {key: str(value) for key, value in vars(arguments).items()}
    facts = environment("cuda")
    write(
        arguments.output, {"benchmark": "step-gpu", **facts, "settings": settings, "results": rows}
    )
    for row in rows:
        goal = f"  goal {row['goal']:g}" if "goal" in row else ""
        missed = "  MISSED" if _missed(row) else ""
        print(f"{row['name']:52} {row['value']:9.3f} {row['unit']}{goal}{missed}")
    return int(any(map(_missed, rows)))


def check_bits() -> None:
    """Stop unless steps on the GPU give the CPU backend's bits."""
    for master_weights, moments in COMBINATIONS.values():
        ends = []
        for device in ("cuda", "cpu"):
            torch.manual_seed(0)
            p = Parameter((0.02 * torch.randn(1_000_003)).bfloat16().to(device))
            opt = AdamW([p], master_weights=master_weights, moments=moments)
            for _ in range(3):
                p.grad = torch.randn(p.shape).bfloat16().to(device)
                opt.step()
            ends.append([tensor.cpu() for tensor in (p.detach(), *opt.state[p].values())])
        if not all(torch.equal(a, b) for a, b in zip(*ends, strict=True)):
            sys.exit(f"{master_weights} + {moments}: GPU and CPU differ; nothing is measured")


def one_tensor(parameters: int, rounds: int) -> list[dict[str, Any]]:
    """Time one large parameter."""
    rows = []
    for name, make in (dict.fromkeys(COMBINATIONS, halfword_arm) | PEERS).items():
        arm = make([(parameters,)], name)
        if arm is None:
            continue
        step, moved = arm
        seconds = measure({name: step, COPY: copy_of(moved or 2 * parameters)}, rounds)
        rows.append(_row(f"{name}, ns a parameter", seconds[name] / parameters * 1e9, "ns"))
        if moved is None:
            continue
        rate = _row(f"{name}, bandwidth", moved / seconds[name] / 1e9, "GB/s")
        share = _row(f"{name}, share of the copy's bandwidth", seconds[COPY] / seconds[name], "")
        if name in COMBINATIONS:
            share["goal"] = BANDWIDTH_GOAL
        rows += [rate, share]
    return rows


def small_tensors(number: int, rounds: int) -> list[dict[str, Any]]:
    """Time many tensors beside one of the same total: as a replayed graph, and from Python."""
    rows = []
    for name in ("split + fp32", "split + bf16-sr"):
        shapes = {"many": [(64, 64)] * number, "one": [(number * 64, 64)]}
        graphs = {key: as_graph(of) for key, of in optimizers(shapes, name, True).items()}
        seconds = measure(graphs, rounds)
        row = _row(f"{number} tensors / one, {name}", seconds["many"] / seconds["one"], "")
        rows.append(row | {"goal": SMALL_GOAL})
        eager = {key: opt.step for key, opt in optimizers(shapes, name, False).items()}
        title = f"{number} tensors, {name}, from Python"
        rows.append(_row(title, measure(eager, rounds)["many"] * 1e6, "us"))
    return rows


def optimizers(
    shapes: dict[str, list[tuple[int, ...]]], name: str, capturable: bool
) -> dict[str, AdamW]:
    """Return an optimizer of halfword for each list of shapes."""
    made = {}
    for key, of_these in shapes.items():
        master_weights, moments = COMBINATIONS[name]
        made[key] = AdamW(
            parameters_of(of_these),
            master_weights=master_weights,
            moments=moments,
            capturable=capturable,
        )
    return made


def as_graph(opt: AdamW) -> Step:
    """Capture a step after a first one; return what replays it."""
    opt.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        opt.step()
    return graph.replay


def measure(arms: dict[str, Step], rounds: int) -> dict[str, float]:
    """Let the arms take turns, three rounds to warm up; return median seconds by arm."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(rounds + 3):
        for name, step in arms.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            for _ in range(REPEATS):
                step()
            end.record()
            end.synchronize()
            if number >= 3:
                seconds[name].append(start.elapsed_time(end) / 1e3 / REPEATS)
    return {name: statistics.median(times) for name, times in seconds.items()}


def parameters_of(shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.bfloat16) -> list[Any]:
    """Return parameters with gradients."""
    made = []
    for shape in shapes:
        p = Parameter((0.02 * torch.randn(shape, device="cuda")).to(dtype))
        p.grad = (1e-3 * torch.randn(shape, device="cuda")).to(dtype)
        made.append(p)
    return made


def copy_of(moved: int) -> Step:
    """Return a copy that reads and writes ``moved`` bytes together."""
    source = torch.zeros(moved // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def bytes_moved(opt: torch.optim.Optimizer) -> int:
    """Return what a step has to read and write."""
    moved = 0
    for group in opt.param_groups:
        for p in group["params"]:
            states = [s for s in opt.state[p].values() if torch.is_tensor(s) and s.numel() > 1]
            moved += 2 * sum(t.nbytes for t in (p, *states)) + p.grad.nbytes
    return moved


def halfword_arm(shapes: list[tuple[int, ...]], name: str) -> Arm | None:
    """Return our step."""
    opt = optimizers({name: shapes}, name, False)[name]
    return opt.step, bytes_moved(opt)


def torch_fp32(shapes: list[tuple[int, ...]], name: str) -> Arm | None:
    """Return torch's fused AdamW on FP32 masters, and the cast to BF16 weights."""
    masters = parameters_of(shapes, torch.float32)
    weights = [master.detach().bfloat16() for master in masters]
    opt = torch.optim.AdamW(masters, fused=True)
    opt.step()

    def step() -> None:
        opt.step()
        torch._foreach_copy_(weights, [master.detach() for master in masters])

    cast = sum(
        master.nbytes + weight.nbytes for master, weight in zip(masters, weights, strict=True)
    )
    return step, bytes_moved(opt) + cast


def torch_bf16(shapes: list[tuple[int, ...]], name: str) -> Arm | None:
    """Return torch's fused AdamW on BF16 weights and states."""
    opt = torch.optim.AdamW(parameters_of(shapes), fused=True)
    opt.step()
    return opt.step, bytes_moved(opt)


def flashoptim(shapes: list[tuple[int, ...]], name: str) -> Arm | None:
    """Return FlashOptim's AdamW as its page recommends it: 24-bit weights, 8-bit moments."""
    try:
        from flashoptim import FlashAdamW
    except ImportError:
        return None
    return FlashAdamW(parameters_of(shapes), lr=1e-3).step, None


def transformer_engine(shapes: list[tuple[int, ...]], name: str) -> Arm | None:
    """Return Transformer Engine's fused Adam with split master weights."""
    try:
        from transformer_engine.pytorch.optimizers import FusedAdam
    except ImportError:
        return None
    opt = FusedAdam(parameters_of(shapes), master_weights=True, store_param_remainders=True)
    return opt.step, None


def torchao(shapes: list[tuple[int, ...]], name: str) -> Arm | None:
    """Return torchao's AdamW with 8-bit moments and stochastic rounding."""
    try:
        from torchao.optim import AdamW8bit
    except ImportError:
        return None
    return AdamW8bit(parameters_of(shapes), bf16_stochastic_round=True).step, None


PEERS: dict[str, Callable[[list[tuple[int, ...]], str], Arm | None]] = {
    "torch fused FP32 + cast": torch_fp32,
    "torch fused BF16": torch_bf16,
    "FlashOptim, 24-bit weights, 8-bit moments": flashoptim,
    "Transformer Engine, remainders": transformer_engine,
    "torchao, 8-bit moments": torchao,
}


def _row(name: str, value: float, unit: str) -> dict[str, Any]:
    return {"name": name, "value": value, "unit": unit}


def _missed(row: dict[str, Any]) -> bool:
    if "goal" not in row:
        return False
    return row["value"] < row["goal"] if row["goal"] < 1 else row["value"] > row["goal"]


if __name__ == "__main__":
    sys.exit(main())

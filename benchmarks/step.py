"""The optimizer step on a CPU beside its peers, in one run: time, memory, first use.

All arms take turns, so that a machine that slows down slows all. A pass is a number of rounds, its
figure the ratio of the arms' medians; of three passes the best one counts, since whatever else runs
on the machine only ever takes time away. Peers: torch's fused AdamW on FP32 masters plus the cast
to BF16 weights; where installed, DeepSpeedCPUAdam on BF16 weights and states, and the 8-bit AdamW
of torchao and bitsandbytes.

    python benchmarks/step.py [--parameters 67108864] [--rounds 15] [--threads 2]

Writes benchmarks/results/step-cpu.json. Fails where a bar is missed, and measures nothing where the
native backend differs from the reference.
"""

import argparse
import importlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halfword import AdamW
from halfword.backends import compiling, native
from halfword.backends.pieces import HEADERS, pieces
from results import RESULTS, environment, write

PASSES = 3
TORCH, DEEPSPEED = "torch fused + cast", "DeepSpeedCPUAdam"
COMBINATIONS = {
    "split + fp32": ("split", "fp32"),
    "split + bf16": ("split", "bf16"),
    "split + bf16-sr": ("split", "bf16-sr"),
    "split + int8": ("split", "int8"),
    "bf16 + bf16": ("bf16", "bf16"),
}
BARS = {
    (TORCH, "split + fp32"): 0.70,
    (TORCH, "split + bf16"): 0.75,
    (TORCH, "split + bf16-sr"): 0.90,
    (TORCH, "split + int8"): 0.95,
    (TORCH, "bf16 + bf16"): 0.70,
    (DEEPSPEED, "bf16 + bf16"): 0.95,
}
EIGHT_BIT_BAR = 1 / 20  # to the 8-bit optimizers of others
STALE_BAR, SMALL_BAR = 1.1, 1.0  # rows without gradient to dense ones; small tensors to torch's
COMPILE_BAR_S, LOAD_BAR_S, MEMORY_BAR_BYTES = 5.0, 0.05, 1 << 20

Step = Callable[[], None]


def main() -> int:
    """Run the benchmark and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=int, default=64 << 20)
    parser.add_argument("--small", type=int, default=2000, help="number of 64 x 64 tensors")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, default=RESULTS / "step-cpu.json")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    check_bits()
    results = [
        *dense(arguments.parameters, arguments.rounds),
        *eight_bit_peers(arguments.parameters),
        *stale_rows(arguments.parameters // 4, arguments.rounds),
        *small_tensors(arguments.small, arguments.rounds),
        *first_use(),
        extra_memory(arguments.parameters // 4),
    ]
    settings = {key: str(value) for key, value in vars(arguments).items() if key != "output"}
    settings["compiler"] = _compiler_version()
    write(
        arguments.output,
        {"benchmark": "step-cpu", **environment(), "settings": settings, "results": results},
    )
    for row in results:
        verdict = "" if "bar" not in row else f"  bar {row['bar']:g}"
        missed = "  MISSED" if _missed(row) else ""
        print(f"{row['name']:52} {row['value']:9.3f} {row['unit']}{verdict}{missed}")
    return int(any(map(_missed, results)))


def check_bits() -> None:
    """Stop unless the native backend gives the reference's bits."""
    for master_weights, moments in COMBINATIONS.values():
        ends = []
        for backend in ("native", "reference"):
            torch.manual_seed(0)
            p = _parameter(157, 64)
            opt = AdamW([p], master_weights=master_weights, moments=moments, backend=backend)
            for _ in range(3):
                p.grad = torch.randn(p.shape).bfloat16()
                opt.step()
            ends.append([p.detach(), *opt.state[p].values()])
        if not all(torch.equal(a, b) for a, b in zip(*ends, strict=True)):
            sys.exit(f"{master_weights} + {moments}: native and reference differ; nothing measured")


def dense(parameters: int, rounds: int) -> list[dict[str, Any]]:
    """Time one large parameter under each combination, beside the peers."""
    shape = (parameters // 1024, 1024)
    arms = {TORCH: torch_arm([shape]), **deepspeed_arm(parameters)}
    arms |= {name: _halfword_arm([shape], name) for name in COMBINATIONS}
    passes = [measure(arms, rounds) for _ in range(PASSES)]
    rows = [
        _row(f"{name}, ns a parameter", min(p[name] for p in passes) / parameters * 1e9, "ns")
        for name in arms
    ]
    for (peer, name), bar in BARS.items():
        if peer in arms:
            ratios = [p[name] / p[peer] for p in passes]
            rows.append(_row(f"{name} / {peer}", min(ratios), "", bar=bar, passes=ratios))
    return rows


def eight_bit_peers(parameters: int, rounds: int = 3) -> list[dict[str, Any]]:
    """Time the 8-bit AdamW of others, in fewer rounds since they take long, beside ours."""
    shape = (parameters // 1024, 1024)
    arms = {"split + int8": _halfword_arm([shape], "split + int8")}
    for package, module in (("torchao", "torchao.optim"), ("bitsandbytes", "bitsandbytes.optim")):
        try:
            make = importlib.import_module(module).AdamW8bit
        except ImportError:
            continue
        p = _parameter(*shape)
        p.grad = 1e-3 * torch.randn(p.shape).bfloat16()
        arms[package] = make([p]).step
    passes = [measure(arms, rounds) for _ in range(PASSES if len(arms) > 1 else 0)]
    rows = []
    for name in list(arms)[1:]:
        best = min(p[name] for p in passes) / parameters * 1e9
        rows.append(_row(f"{name}, 8-bit AdamW, ns a parameter", best, "ns"))
        ratios = [p["split + int8"] / p[name] for p in passes]
        title = f"split + int8 / {name}, 8-bit AdamW"
        rows.append(_row(title, min(ratios), "", bar=EIGHT_BIT_BAR, passes=ratios))
    return rows


def stale_rows(parameters: int, rounds: int) -> list[dict[str, Any]]:
    """Time rows whose moments have just decayed away, a quarter of all, beside dense ones."""
    shape = (parameters // 1024, 1024)
    rows = []
    for name in COMBINATIONS:
        arms = {"dense": _halfword_arm([shape], name), "stale": _halfword_arm([shape], name, 0.25)}
        passes = [measure(arms, rounds) for _ in range(PASSES)]
        ratios = [p["stale"] / p["dense"] for p in passes]
        title = f"{name}, 25 % of rows without gradient / dense"
        rows.append(_row(title, min(ratios), "", bar=STALE_BAR, passes=ratios))
    return rows


def small_tensors(number: int, rounds: int) -> list[dict[str, Any]]:
    """Time many tensors in one step, beside torch's fused step without its cast."""
    shapes = [(64, 64)] * number
    arms = {"torch": torch_arm(shapes, cast=False)}
    arms |= {name: _halfword_arm(shapes, name) for name in ("split + fp32", "split + bf16-sr")}
    passes = [measure(arms, rounds) for _ in range(PASSES)]
    rows = []
    for name in list(arms)[1:]:
        ratios = [p[name] / p["torch"] for p in passes]
        title = f"{number} tensors of 64 x 64, {name}"
        rows.append(_row(f"{title} / torch fused", min(ratios), "", bar=SMALL_BAR, passes=ratios))
        rows.append(_row(title, min(p[name] for p in passes) / number * 1e6, "us a tensor"))
    return rows


def first_use() -> list[dict[str, Any]]:
    """Time the compilation of all pieces, and how long a later process takes to load them."""
    source = pieces().source
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        compiling.build(source, HEADERS, Path(folder))
        compile_s = time.perf_counter() - started
    native.library.cache_clear()
    started = time.perf_counter()
    native.library()
    load_s = time.perf_counter() - started
    return [
        _row("compile everything, once", compile_s, "s", bar=COMPILE_BAR_S),
        _row("load it in a later process", load_s, "s", bar=LOAD_BAR_S),
    ]


def extra_memory(parameters: int) -> dict[str, Any]:
    """Measure how far a step raises the most memory that the process has held."""
    step = _halfword_arm([(parameters,)], "split + bf16-sr")
    step()
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = _status_bytes("VmRSS")
    step()
    extra = max(0, _status_bytes("VmHWM") - before)
    return _row("extra memory of a step", extra, "bytes", bar=MEMORY_BAR_BYTES)


def measure(arms: dict[str, Step], rounds: int) -> dict[str, float]:
    """Let the arms take turns, two rounds to warm up; return median seconds by arm."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(rounds + 2):
        for name, step in arms.items():
            started = time.perf_counter()
            step()
            if number >= 2:
                seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(times) for name, times in seconds.items()}


def torch_arm(shapes: list[tuple[int, ...]], cast: bool = True) -> Step:
    """Return torch's fused AdamW on FP32 masters, and the cast to BF16 weights."""
    masters = [torch.nn.Parameter(0.02 * torch.randn(shape)) for shape in shapes]
    weights = [master.detach().bfloat16() for master in masters]
    opt = torch.optim.AdamW(masters, fused=True)
    for master in masters:
        master.grad = 1e-3 * torch.randn(master.shape)

    def step() -> None:
        opt.step()
        if cast:
            for weight, master in zip(weights, masters, strict=True):
                weight.copy_(master.detach())

    return step


def deepspeed_arm(parameters: int) -> dict[str, Step]:
    """Return DeepSpeedCPUAdam on BF16 weights and states, where it is installed."""
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam
    except ImportError:
        return {}
    p = _parameter(parameters)
    p.grad = 1e-3 * torch.randn(p.shape).bfloat16()
    opt = DeepSpeedCPUAdam([p], fp32_optimizer_states=False)
    return {DEEPSPEED: lambda: opt.step()}


def _halfword_arm(shapes: list[tuple[int, ...]], name: str, stale: float = 0.0) -> Step:
    master_weights, moments = COMBINATIONS[name]
    params = [_parameter(*shape) for shape in shapes]
    opt = AdamW(params, master_weights=master_weights, moments=moments, backend="native")
    for p in params:
        p.grad = 1e-3 * torch.randn(p.shape).bfloat16()
        num_stale = int(stale * p.shape[0])
        if num_stale:
            p.grad[:num_stale] = 0
            for key, moment in opt.state[p].items():
                if key.startswith("exp_avg"):
                    smallest = 2.0**-122 if key.endswith("_scale") else 2.0**-126
                    moment[:num_stale] = 1 if key.endswith("_code") else smallest
    return lambda: opt.step()


def _parameter(*shape: int) -> torch.nn.Parameter:
    weights: Tensor = 0.02 * torch.randn(shape)
    return torch.nn.Parameter(weights.bfloat16())


def _row(name: str, value: float, unit: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "value": value, "unit": unit, **more}


def _missed(row: dict[str, Any]) -> bool:
    return "bar" in row and row["value"] > row["bar"]


def _compiler_version() -> str:
    compiler = compiling.find_compiler()
    assert compiler is not None
    run = subprocess.run([*compiler.command, "--version"], capture_output=True, text=True)
    return run.stdout.splitlines()[0]


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) << 10
    raise LookupError(field)


if __name__ == "__main__":
    sys.exit(main())

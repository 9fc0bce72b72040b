"""What ranks do in tests/test_parallel.py: one launch of a world size runs all of it.

Most cases compare this rank's part of every plane with what one process alone makes of the same
gradients, and return the names of those that differ.
"""

import functools
import hashlib
import itertools
import math
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.futures import Future

from halfword import AdamW, Optimizer
from halfword.checkpoint import Ranks, flatten, read, restore, targets, write
from halfword.parallel import Parallel, gather, parallelize
from halfword.parallel.replicated import Reducer
from halfword.parallel.sharded import Sharded
from halfword.shards import is_sharded, layout, local, part_of, shard
from halfword.train.config import PRESETS, TrainConfig
from halfword.train.loop import train_step
from halfword.train.training import build
from halfword.train.world import World
from helpers import OPTIMIZERS, combinations, name_of, pattern, same

BF16, STOCHASTIC = torch.bfloat16, ("adamw", torch.bfloat16, "bf16-sr", ("bf16-sr", "bf16-sr"))
COMBINATIONS = [
    (rule, dtype, master_weights, moments)
    for rule, dtype, master_weights, moments in combinations()
    if len(set(moments)) <= 1 and (rule == "adamw" or (dtype, master_weights) == (BF16, "auto"))
]
STAGES = (0, 1, 2, 3)
SAVED = [(0, "exact"), (1, "bf16-sr"), (2, "lean"), *((3, precision) for precision in PRESETS)]
Digests = dict[str, str]
Make = Callable[[torch.dtype], nn.Module]

warnings.filterwarnings("ignore", category=UserWarning)


class Net(nn.Module):
    """Parameters of every awkward kind: tied, frozen, and smaller than the world."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(7, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.frozen = nn.Linear(6, 3).requires_grad_(False)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight
        self.gain = nn.Parameter(torch.ones(1))
        self.cube = nn.Parameter(torch.randn(2, 2, 2))
        self.wide = nn.Parameter(torch.randn(523, 128))  # more than one tile of the reference


def spread(stage: int, mesh: DeviceMesh) -> Make:
    """Return what makes the model on a mesh."""

    def make(dtype: torch.dtype) -> Parallel:
        model = Net().to(dtype)
        return parallelize(model, stage, mesh, units=model.layers)

    return make


def cut(mesh: DeviceMesh, placements: list[Any]) -> Make:
    """Return what makes the model with DTensors as tensor parallelism has them."""

    def make(dtype: torch.dtype) -> nn.Module:
        model = Net().to(dtype)
        for name in ("wide", "cube"):
            whole = getattr(model, name).detach()
            setattr(model, name, nn.Parameter(distribute_tensor(whole, mesh, placements)))
        return model

    return make


def gradient(name: str, p: Tensor, step: int) -> Tensor:
    """A whole gradient that depends on the name, the shape and the step alone."""
    seed = int.from_bytes(hashlib.sha256(f"{name}{step}".encode()).digest()[:6], "little")
    whole = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed)).to(p.dtype)
    return shard(whole, *layout(p)) if is_sharded(p) else whole


def inject(model: nn.Module, optimizer: Optimizer, steps: Iterable[int]) -> None:
    """Take steps on gradients that are the same for every sharding."""
    for step in steps:
        for name, p in model.named_parameters():
            p.grad = gradient(name, p, step) if p.requires_grad else None
        optimizer.step()
        optimizer.zero_grad()


def digests(model: nn.Module, optimizer: Optimizer) -> Digests:
    """A hash of every weight, master weight and state, whole."""
    found = {}
    for name, p in model.named_parameters():
        state = {key: plane for key, plane in optimizer.state[p].items() if key != "step"}
        planes = {"weight": p, "master": optimizer.master_weight(p), **state}
        for key, plane in planes.items():
            found[f"{name}.{key}"] = digest(gather(plane))
    return found


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(pattern(tensor).numpy().tobytes()).hexdigest()


def made(make: Make, combination: Any) -> tuple[nn.Module, Optimizer]:
    """A model and its optimizer, of one rule and formats."""
    rule, dtype, master_weights, moments = combination
    model = make(dtype)
    settings = {"master_weights": master_weights, "moments": moments or "fp32", "seed": 5}
    optimizer = OPTIMIZERS[rule](list(model.named_parameters()), **settings)
    if isinstance(model, Parallel):
        model.attach(optimizer)
    return model, optimizer


@functools.cache
def alone(combination: Any, steps: int) -> tuple[nn.Module, Optimizer]:
    """What one process makes of the model by injected gradients."""
    model, optimizer = made(lambda dtype: Net().to(dtype), combination)
    inject(model, optimizer, range(steps))
    return model, optimizer


def differing(model: nn.Module, optimizer: Optimizer, combination: Any, steps: int) -> list[str]:
    """The planes whose part on this rank is not that of one process alone."""
    reference, by = alone(combination, steps)
    names = dict(reference.named_parameters())
    found = []
    for name, p in model.named_parameters():
        whole = names[name]
        planes = {
            "weight": (p, whole),
            "master": (optimizer.master_weight(p), by.master_weight(whole)),
        }
        planes |= {key: (plane, by.state[whole][key]) for key, plane in optimizer.state[p].items()}
        assert optimizer.state[p].keys() == by.state[whole].keys()
        for key, (part, expected) in planes.items():
            if not same(local(part), expected if key == "step" else part_of(expected, p)):
                found.append(f"{name}.{key}")
    return found


def injected(make: Make, combination: Any = STOCHASTIC) -> list[str]:
    """What differs after three steps."""
    model, optimizer = made(make, combination)
    inject(model, optimizer, range(3))
    return differing(model, optimizer, combination, 3)


def every_format(mesh: DeviceMesh) -> dict[Any, list[str]]:
    """What differs in each stage, after three steps."""
    return {
        (stage, name_of(combination)): injected(spread(stage, mesh), combination)
        for combination in COMBINATIONS
        for stage in stages_of(mesh.size(), combination)
    }


def stages_of(size: int, combination: Any) -> tuple[int, ...]:
    """Stages 0 and 2 hold what a process alone and stage 3 hold: all formats in one world do."""
    return STAGES if size == 2 or combination == STOCHASTIC else (1, 3)


def other_layouts(mesh: DeviceMesh) -> dict[str, list[str]]:
    """Columns on each rank, and blocks and copies where the world is a square."""
    found = {"columns": injected(cut(mesh, [Shard(1)]))}
    if mesh.size() == 4:
        found["blocks"] = injected(cut(square(), [Shard(0), Shard(1)]))
        found["copies"] = injected(cut(square(), [Replicate(), Shard(1)]))
        for stage in (1, 3):
            found[f"hybrid, stage {stage}"] = injected(spread(stage, square()))
    return found


@functools.cache
def square() -> DeviceMesh:
    """Two copies of two shards, for 4 ranks."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def refused(mesh: DeviceMesh) -> str:
    """The error for a sum that is not done."""
    partial = DTensor.from_local(torch.ones(4).bfloat16(), mesh, [Partial()])
    try:
        AdamW([("w", nn.Parameter(partial))])
    except ValueError as error:
        return str(error)
    return "nothing"


def cut_block(mesh: DeviceMesh) -> str:
    """The error for columns that end within a block of 8-bit moments."""
    whole = torch.ones(64, 64 * mesh.size() + 64).bfloat16()
    columns = nn.Parameter(distribute_tensor(whole, mesh, [Shard(1)]))
    try:
        AdamW([("w", columns)], moments="int8")
    except ValueError as error:
        return str(error)
    return "nothing"


def nonfinite(mesh: DeviceMesh) -> dict[str, Any]:
    """An Inf in the last rank's rows of one gradient."""
    model = spread(1, mesh)(BF16)
    optimizer = AdamW(list(model.named_parameters()), on_nonfinite="skip")
    model.attach(optimizer)
    inject(model, optimizer, range(1))
    before = digests(model, optimizer)
    for name, p in model.named_parameters():
        whole = gather(gradient(name, p, 1))
        if name == "wide":
            whole[-1, 5] = torch.inf
        p.grad = shard(whole, *layout(p))
    norm = optimizer.clip_grad_norm(math.inf).item()
    optimizer.step()
    skipped = optimizer.step_was_skipped
    unchanged = digests(model, optimizer) == before
    optimizer.param_groups[0]["on_nonfinite"] = optimizer.defaults["on_nonfinite"] = "raise"
    try:
        optimizer.step()
        message = "nothing"
    except ValueError as error:
        message = str(error)
    return {"skipped": skipped, "unchanged": unchanged, "norm": norm, "message": message}


def norms(mesh: DeviceMesh) -> dict[str, float]:
    """The norm of the same gradients, however they are sharded; and over a process group."""
    makes = {f"stage {stage}": spread(stage, mesh) for stage in STAGES}
    makes["columns"] = cut(mesh, [Shard(1)])
    found = {}
    for name, make in makes.items():
        model, optimizer = made(make, STOCHASTIC)
        for parameter_name, p in model.named_parameters():
            p.grad = gradient(parameter_name, p, 0) if p.requires_grad else None
        found[name] = optimizer.clip_grad_norm(1.0).item()
    alone = nn.Parameter(torch.ones(3))
    optimizer = AdamW([alone])
    optimizer.process_group = distributed.group.WORLD
    alone.grad = torch.full((3,), float(mesh.get_rank() + 1))
    found["process group"] = optimizer.clip_grad_norm(1.0).item()
    return found


class Adapted(nn.Module):
    """A frozen BF16 matrix with an FP32 adapter, as LoRA has them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(6, 6).bfloat16().requires_grad_(False)
        self.adapter = nn.Linear(6, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x.bfloat16()).float() + self.adapter(x)


def adapters(mesh: DeviceMesh) -> dict[int, Digests]:
    """A step through forward and backward where dtypes are mixed and some weights frozen."""
    found = {}
    for stage in STAGES:
        model = Adapted()
        model = parallelize(model, stage, mesh, units=[model.base, model.adapter])
        optimizer = AdamW(list(model.named_parameters()), lr=1e-2)
        model.attach(optimizer)
        model.backward(model(torch.ones(2, 6) * (mesh.get_rank() + 1)).square().mean())
        optimizer.step()
        found[stage] = digests(model, optimizer)
    return found


def trained(config: TrainConfig, mesh: DeviceMesh, damaged: bool = False) -> dict[str, Any]:
    """Steps of the trainer: losses, norms, and hashes of the weights that this rank computes by."""
    world = World(mesh.get_rank(), mesh.size())
    world.mesh = mesh
    with patch.object(Reducer, "reduce", own_bucket) if damaged else patch.dict({}):
        training = build(config, world)
    if damaged and isinstance(training.model, Sharded):
        for unit in training.model.units:
            unit.set_custom_reduce_scatter(OwnPart())
    rows = [train_step(training, step) for step in range(config.num_steps)]
    used = training.model.module.state_dict()
    return {
        "losses": [row.loss for row in rows],
        "tokens": rows[0].tokens,
        "digests": digests(training.model, training.optimizer),
        "used": {name.removeprefix("module."): digest(gather(p)) for name, p in used.items()},
    }


def own_bucket(reducer: Reducer, bucket: distributed.GradBucket) -> Future[Tensor]:
    """Reduce nothing: a rank keeps its own gradients."""
    future: Future[Tensor] = Future()
    future.set_result(bucket.buffer())
    return future


class OwnPart:
    """Reduce nothing, for FSDP2: a rank keeps its own gradients of its part."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, **_: Any) -> None:
        output_tensor.copy_(input_tensor.chunk(group.size())[group.rank()])


def trainings(mesh: DeviceMesh, settings: dict[str, Any]) -> dict[str, Any]:
    """Every stage on the same data, and what should not or should make a difference."""
    settings = settings | {"batch_size": settings["batch_size"] // mesh.size()}

    def of(
        stage: int, damaged: bool = False, mesh: DeviceMesh = mesh, **changes: Any
    ) -> dict[str, Any]:
        config = TrainConfig(**{**settings, "zero_stage": stage, **changes})
        return trained(config, mesh, damaged)

    found = {f"stage {stage}": of(stage) for stage in STAGES}
    short = {"num_steps": 4}
    cumulative = short | {"gradient_accumulation_steps": 2}
    found |= {f"not reduced {stage}": of(stage, True, num_steps=12) for stage in STAGES}
    if mesh.size() == 4:
        found["accumulated 0"] = of(0, **cumulative)
        found |= {f"hybrid {stage}": of(stage, mesh=square(), **cumulative) for stage in (1, 3)}
    if mesh.size() == 2:
        found |= {f"accumulated {stage}": of(stage, **cumulative) for stage in STAGES}
        found["accumulated, offloaded"] = of(3, **cumulative, cpu_offload=True)
        found["short"] = of(3, **short)
        found["recomputed"] = of(3, **short, activation_checkpointing=True)
        found["offloaded"] = of(3, **short, cpu_offload=True)
        found["summed in bf16"] = of(3, **short, reduce_dtype="bf16")
    return found


def saves(mesh: DeviceMesh, folder: Path) -> dict[Any, list[str]]:
    """A checkpoint of each preset and stage after two steps."""
    found = {}
    ranks = Ranks(distributed.new_group(backend="gloo"))
    for stage, precision in SAVED:
        model, optimizer = made(spread(stage, mesh), preset(precision))
        inject(model, optimizer, range(2))
        save(model, optimizer, folder / f"{stage}-{precision}", ranks)
        found[stage, precision] = differing(model, optimizer, preset(precision), 2)
    return found


def save(model: nn.Module, optimizer: Optimizer, folder: Path, ranks: Ranks) -> None:
    """Write a checkpoint after two steps."""
    tensors, settings = flatten(model, optimizer)
    write(folder, 2, tensors, {"contents": settings}, ranks)


def loads(mesh: DeviceMesh, folder: Path) -> dict[Any, list[str]]:
    """What differs in each checkpoint that is read in another stage and world."""
    found = {}
    ranks = Ranks(distributed.new_group(backend="gloo"))
    for (stage, precision), into in itertools.product(SAVED, STAGES):
        saved = folder / f"{stage}-{precision}"
        found[stage, precision, into] = loaded(spread(into, mesh), precision, saved, ranks)
    for precision in PRESETS:  # stage 3 to 0 and back
        model, optimizer = read_into(spread(0, mesh), precision, folder / f"3-{precision}", ranks)
        back = folder / f"back-{mesh.size()}-{precision}"
        save(model, optimizer, back, ranks)
        found["back", precision] = loaded(spread(3, mesh), precision, back, ranks)
    return found


def loaded(make: Make, precision: str, folder: Path, ranks: Ranks | None = None) -> list[str]:
    """What differs after a checkpoint is read, and after one step more."""
    model, optimizer = read_into(make, precision, folder, ranks)
    found = differing(model, optimizer, preset(precision), 2)
    inject(model, optimizer, [2])
    return found + differing(model, optimizer, preset(precision), 3)


def read_into(
    make: Make, precision: str, folder: Path, ranks: Ranks | None
) -> tuple[nn.Module, Optimizer]:
    """A model and its optimizer that a checkpoint was read into."""
    model, optimizer = made(make, preset(precision))
    _, tensors, state = read(folder, targets(model), ranks)
    restore(model, optimizer, tensors, state["contents"])
    return model, optimizer


def preset(precision: str) -> Any:
    formats = PRESETS[precision]
    return "adamw", BF16, formats.master_weights, (formats.moments,) * 2


def held(mesh: DeviceMesh) -> dict[Any, dict[str, dict[str, int]]]:
    """Bytes by component and plane on this rank, of each stage and preset."""
    found = {}
    for stage, precision in itertools.product(STAGES, PRESETS):
        _, optimizer = made(spread(stage, mesh), preset(precision))
        found[stage, precision] = optimizer.memory().components
    return found


def run_all(rank: int, size: int, folder: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Everything that the launch of one world size does."""
    mesh = init_device_mesh("cpu", (size,))
    shared = Path(folder)
    return {
        "formats": every_format(mesh),
        "other layouts": other_layouts(mesh),
        "refused": refused(mesh),
        "cut block": cut_block(mesh),
        "nonfinite": nonfinite(mesh),
        "norms": norms(mesh),
        "adapters": adapters(mesh) if size == 2 else {},
        "trainings": trainings(mesh, settings) if size in (2, 4) else {},
        "held": held(mesh),
        "saves": saves(mesh, shared) if size == 4 else {},
        "loads": loads(mesh, shared) if size != 4 else {},
    }

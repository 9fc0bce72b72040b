"""What a training step takes beyond weights and states: the step itself, run on fake tensors.

Fake tensors have shapes and no memory, and a fake process group answers for the other ranks, so a
step of any model on any number of ranks runs here in seconds. torch's memory trackers count what
would be alive.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch._subclasses import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore

COMPONENTS = {
    "Parameter": "weights",
    "Sharded Param": "weights",
    "Unsharded Param": "gathered_weights",
    "Buffer": "buffers",
    "Gradient": "gradients",
    "Sharded Grad": "gradients",
    "Unsharded Grad": "gathered_gradients",
    "Activation": "activations",
    "Temp": "temporaries",
    "All Gather": "communication",
    "Reduce Scatter": "communication",
    "Inputs": "inputs",
    "Other": "inputs",
}
"""What the trackers' kinds of memory are called here."""


@dataclass(frozen=True)
class Step:
    """A training step that can be traced.

    Attributes:
        root: the model; under FSDP2 its root.
        inputs: what is there before, beside weights; ``trace`` empties the list, not to keep them.
        run: takes it, with one forward pass; without the optimizer, whose backends take no memory
            that grows with the model.
    """

    root: nn.Module
    inputs: list[Tensor]
    run: Callable[[], None]


@dataclass(frozen=True)
class Traced:
    """Bytes by component.

    Attributes:
        peak: when most was alive in forward, backward and exchange of weights.
        after: once all gradients were there.
    """

    peak: dict[str, int]
    after: dict[str, int]


def trace(build: Callable[[], Step]) -> Traced:
    """Run a step once and count what is alive; all in ``fake_ranks``.

    Args:
        build: makes it.
    """
    tracker = MemTracker()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of fake tensors that have no address
        with tracker:  # which sees the buckets that DistributedDataParallel makes
            step = build()
        if isinstance(step.root, FSDPModule):
            tracker = FSDPMemTracker(step.root)
            tracker.track_inputs(tuple(step.inputs))
        else:
            tracker.track_external(step.root, *step.inputs)
        step.inputs.clear()
        with tracker:  # the peak starts anew
            step.run()
    return Traced(*(_named(tracker.get_tracker_snapshot(kind)) for kind in ("peak", "current")))


@contextlib.contextmanager
def fake_ranks(world_size: int, sizes: Mapping[str, int]) -> Iterator[DeviceMesh | None]:
    """Be the first of some ranks that are not there, and make fake tensors only.

    Args:
        world_size: how many; 1 needs no process group.
        sizes: of the mesh, by name of its dimensions.

    Yields:
        The mesh of all ranks; None for one.
    """
    with contextlib.ExitStack() as stack:
        mesh = None
        if world_size > 1:
            distributed.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
            stack.callback(distributed.destroy_process_group)
            mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        stack.enter_context(FakeTensorMode())
        yield mesh


def _named(snapshot: Mapping[torch.device, Mapping[Any, int]]) -> dict[str, int]:
    """Return the bytes of the one device by our components."""
    (kinds,) = snapshot.values()
    sizes: dict[str, int] = {}
    for kind, size in kinds.items():
        if size and kind != "Total":
            name = COMPONENTS[kind.value]
            sizes[name] = sizes.get(name, 0) + size
    return sizes

"""Training on several ranks with torch's own engines: ZeRO stages 0 to 3.

Stages 0 and 1 run the model under DistributedDataParallel, 2 and 3 under FSDP2. From stage 1 on the
optimizer holds ``Shard(0)`` DTensors of one layout, so states, checkpoints and bits are the same.
Left out: torch's ZeroRedundancyOptimizer (it shards whole parameters, gathers states on one rank
and casts them by value on load), and stage 2 by ``set_reshard_after_backward(False)``, which trains
on stale weights.
"""

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from halfword.parallel.base import Parallel, Reduction
from halfword.parallel.replicated import Replicated
from halfword.parallel.sharded import Sharded
from halfword.shards import gather

__all__ = ["Parallel", "gather", "parallelize"]


def parallelize(
    model: nn.Module,
    zero_stage: int,
    mesh: DeviceMesh,
    *,
    units: Iterable[nn.Module] = (),
    reduce_dtype: torch.dtype = torch.float32,
    average_gradients: bool = True,
    cpu_offload: bool = False,
) -> Parallel:
    """Spread a model over ranks.

    Args:
        model: the same on all ranks; it becomes part of the result.
        zero_stage: what each rank holds only a part of. 0: nothing; 1: optimizer states; 2: also
            gradients, and weights between steps; 3: weights at all times.
        mesh: of all ranks: one dimension, or two of which the first replicates, the second shards.
        units: modules that stages 2 and 3 gather one at a time, as layers; the rest is one more.
        reduce_dtype: of the sums of gradients over ranks.
        average_gradients: divide sums by the number of ranks, for losses that are means over a
            rank's data; else not, for losses that were divided by a count over all ranks.
        cpu_offload: stages 2 and 3 keep weights, gradients and states on the CPU, which then does
            the step.

    Raises:
        ValueError: a stage that does not exist or cannot offload, a mesh that does not fit, or an
            empty weight in stages 2 and 3.
    """
    if zero_stage not in (0, 1, 2, 3):
        raise ValueError(f"zero_stage={zero_stage!r}: use 0, 1, 2 or 3")
    if cpu_offload and zero_stage < 2:
        raise ValueError(f"cpu_offload=True: needs zero_stage 2 or 3, not {zero_stage}")
    empty = [name for name, parameter in model.named_parameters() if not parameter.numel()]
    if empty and zero_stage > 1:
        raise ValueError(
            f"parameter {empty[0]!r} is empty, which FSDP2 cannot reduce: use zero_stage 0 or 1"
        )
    if mesh.ndim > 2 or (mesh.ndim == 2 and mesh.mesh_dim_names is None):
        raise ValueError(
            f"mesh has shape {tuple(mesh.shape)}: use one dimension, or two with mesh_dim_names"
        )
    reduction = Reduction(reduce_dtype, mesh.size() if average_gradients else 1)
    if zero_stage < 2:
        return Replicated(model, zero_stage, mesh, reduction)
    return Sharded(model, zero_stage, mesh, reduction, units, cpu_offload)

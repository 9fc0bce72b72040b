"""Stages 2 and 3: weights are sharded too, and FSDP2 runs the model."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from halfword.accumulate import Accumulation, watch
from halfword.optimizer import Optimizer
from halfword.parallel.base import Parallel, Reduction, padded_numel
from halfword.shards import local, wrap


class Sharded(Parallel):
    """A model under FSDP2; its parameters are the ``Shard(0)`` DTensors that FSDP2 made."""

    def __init__(
        self,
        model: nn.Module,
        zero_stage: int,
        mesh: DeviceMesh,
        reduction: Reduction,
        units: Iterable[nn.Module],
        cpu_offload: bool,
    ) -> None:
        super().__init__(model)
        self._size = mesh.size(-1)
        self.units: list[FSDPModule] = []
        pin_memory = mesh.device_type != "cpu"
        for unit in (*units, model):
            fully_shard(
                unit,
                mesh=mesh,
                # None: all but the last unit, which the backward pass begins with.
                reshard_after_forward=False if zero_stage == 2 else None,
                mp_policy=MixedPrecisionPolicy(reduce_dtype=reduction.dtype),
                offload_policy=CPUOffloadPolicy(pin_memory) if cpu_offload else OffloadPolicy(),
            )
            assert isinstance(unit, FSDPModule)
            if reduction.divisor == 1:
                # Else FSDP2 is not told: told, it divides twice where each rank has a whole copy.
                unit.set_gradient_divide_factor(1)
            unit.set_force_sum_reduction_for_comms(True)  # gloo has no averages
            self.units.append(unit)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Run the model; all ranks must."""
        outputs = super().forward(*inputs, **named)
        if not torch.is_grad_enabled():  # no backward pass will do it
            self.share_weights()
        return outputs

    def accumulate_in_fp32(self, optimizer: Optimizer) -> Accumulation:
        """Do as the optimizer's own method, but add sums over ranks before they are rounded."""
        watched = bool(self._accumulations)
        handle = super().accumulate_in_fp32(optimizer)
        if not watched:
            self._watch_sums()
        return handle

    def share_weights(self) -> None:
        """Give up whole weights, which a forward pass without a backward pass leaves behind."""
        for unit in self.units:
            unit.reshard()

    def _watch_sums(self) -> None:
        claimed: set[nn.Parameter] = set()
        for unit in self.units:
            assert isinstance(unit, nn.Module)
            own = [p for p in unit.parameters() if p not in claimed]
            claimed.update(own)
            sums = UnitSums(self._accumulations, self._size)
            unit.set_all_reduce_hook(sums.begin)
            for parameter in own:
                # Before an accumulation's own hook, which takes what this one offers.
                hook = watch(parameter, sums.offer)
                parameter._post_accumulate_grad_hooks.move_to_end(hook.id, last=False)  # type: ignore[attr-defined]


class UnitSums:
    """Finds each parameter's gradient in the sums of a unit, before FSDP2 rounds them.

    FSDP2 reduces a unit's gradients as one flat tensor, shows it, divides it in place, and then
    calls the hooks of the parameters in it, in the order in which they lie there, each padded to
    the largest part.
    """

    def __init__(self, accumulations: list[Accumulation], size: int) -> None:
        self._accumulations = accumulations
        self._size = size
        self._left = torch.empty(0)

    def begin(self, flat: Tensor) -> None:
        """Take the sums of one backward pass, FP32, one after the other."""
        self._left = flat

    def offer(self, parameter: Tensor) -> None:
        """Offer the next parameter's part of the sums to the accumulations."""
        part = local(parameter)
        own = self._left[: part.numel()].view(part.shape).to(part.device)
        for accumulation in self._accumulations:
            accumulation.offer(parameter, wrap(own, parameter))
        left = self._left[padded_numel(parameter, self._size) :]
        self._left = left if len(left) else torch.empty(0)  # which keeps nothing alive

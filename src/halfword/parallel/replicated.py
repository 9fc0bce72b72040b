"""Stages 0 and 1: every rank has all weights, and DistributedDataParallel runs the model."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch._C._distributed_c10d import GradBucket
from torch._guards import active_fake_mode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from halfword.accumulate import Accumulation
from halfword.optimizer import Optimizer
from halfword.parallel.base import Parallel, Reduction, padded_numel
from halfword.shards import is_sharded, local, part_of, shard

BUCKET_BYTES = 1 << 25
"""How much of the weights travels at once after a step of stage 1, over all ranks."""

Pair = tuple[nn.Parameter, nn.Parameter]  # a weight of the model, and the optimizer's view of it


class Replicated(Parallel):
    """A model under DistributedDataParallel.

    The optimizer holds *views* of the weights, whole in stage 0 and ``Shard(0)`` DTensors in
    stage 1: what it writes is in the model at once. Their gradients are views of DDP's buckets.
    """

    module: DistributedDataParallel

    def __init__(
        self, model: nn.Module, zero_stage: int, mesh: DeviceMesh, reduction: Reduction
    ) -> None:
        group = mesh.get_group() if mesh.ndim == 1 else None
        has_values = active_fake_mode() is None  # else memory is planned, on fake tensors
        ddp = DistributedDataParallel(
            model,
            process_group=group,
            init_sync=has_values,
            forward_sync_buffers=False,
            gradient_as_bucket_view=True,
            # Else DDP lays its buckets out anew after the first backward pass, and ranks add up in
            # another order: a run that is resumed would differ from one that goes on.
            find_unused_parameters=has_values,
        )
        super().__init__(ddp)
        self._reducer = Reducer(group, reduction, self._accumulations)
        ddp.register_comm_hook(self._reducer, Reducer.reduce)
        self._mesh = mesh
        self._placements = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
        self._stage = zero_stage
        self._views = {p: self._view(p) for p in model.parameters()}
        self._is_attached = False

    def backward(self, loss: Tensor) -> None:
        """Compute gradients, reduced over the ranks, of what ``named_parameters`` gives.

        Raises:
            ValueError: no optimizer is attached.
        """
        if not self._is_attached:
            raise ValueError("call attach(optimizer) before backward: ranks would drift apart")
        for view in self._views.values():
            if view.grad is not None:  # the buckets are about to be used again
                view.grad = view.grad.clone()
        self._reducer.buckets.clear()
        super().backward(loss)
        for parameter, view in self._views.items():
            sums = self._reducer.sums.pop(parameter, None)
            if parameter.grad is None:  # no rank used it
                continue
            gradient = self._part(parameter.grad, view)
            view.grad = gradient if view.grad is None else view.grad + gradient
            parameter.grad = None
            if sums is not None:
                for accumulation in self._accumulations:
                    accumulation.offer(view, self._part(sums, view))
            for hook in (view._post_accumulate_grad_hooks or {}).values():  # as FSDP2 does
                hook(view)

    def attach(self, optimizer: Optimizer) -> None:
        """Keep the ranks' weights equal to what this optimizer writes.

        Its step raises ValueError where gradients came by another way than ``backward``.
        """
        super().attach(optimizer)
        optimizer.register_step_pre_hook(lambda *_: self._check_gradients())
        self._is_attached = True

    def idle_bytes(self) -> int:
        """Return the bytes that communication keeps and that no gradient is a view of."""
        gradients = [view.grad for view in self._views.values() if view.grad is not None]
        viewed = {local(gradient).untyped_storage()._cdata for gradient in gradients}
        buckets = self._reducer.buckets.items()
        return sum(size for storage, size in buckets if storage not in viewed)

    @torch.no_grad()
    def share_weights(self) -> None:
        """Gather on every rank the parts that the others hold, some weights at a time."""
        sharded = [pair for pair in self._views.items() if is_sharded(pair[1])]
        for bucket in _buckets(sharded):
            self._gather(bucket)

    def named_parameters(self, *args: Any, **named: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Give what the optimizer is to hold, under the names of the model."""
        for name, parameter in self.module.module.named_parameters(*args, **named):
            yield name, self._views[parameter]

    def state_dict(self, *, keep_vars: bool = False) -> dict[str, Any]:  # type: ignore[override]
        """Return the model's state dict, its weights as the optimizer holds them."""
        state: dict[str, Any] = self.module.module.state_dict(keep_vars=True)
        for name, value in state.items():
            if isinstance(value, Tensor):
                held = self._views.get(value, value)  # type: ignore[call-overload]
                state[name] = held if keep_vars else self._part(value.detach(), held)
        return state

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **named: Any) -> Any:
        """Load a state dict of the model, laid out as ``state_dict`` returns it, or whole."""
        weights = dict(state_dict)
        for name, view in self.state_dict(keep_vars=True).items():
            if name not in weights or not isinstance(view, Tensor) or not is_sharded(view):
                continue
            if weights[name].shape == view.shape:  # others are told of below, with all names
                local(view).copy_(part_of(weights.pop(name), view))
        self.share_weights()
        whole = self.module.module.state_dict()
        shared = {name: whole[name] for name in state_dict.keys() - weights.keys()}
        return self.module.module.load_state_dict(weights | shared, *args, **named)

    def _check_gradients(self) -> None:
        if any(parameter.grad is not None for parameter in self._views):
            raise ValueError(
                "gradients have not reached the optimizer: call model.backward(loss) "
                "for loss.backward()"
            )

    def _view(self, parameter: nn.Parameter) -> nn.Parameter:
        if self._stage and parameter.ndim and parameter.numel():
            view = shard(parameter, self._mesh, self._placements)
            assert isinstance(view, nn.Parameter)
            return view
        return nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)

    def _part(self, whole: Tensor, view: Tensor) -> Tensor:
        return shard(whole, self._mesh, self._placements) if is_sharded(view) else whole

    def _gather(self, bucket: list[Pair]) -> None:
        """Fill parameters of one dtype from the parts that each rank holds."""
        group, size = self._mesh.get_group(self._mesh.ndim - 1), self._mesh.size(-1)
        counts = [padded_numel(parameter, size) for parameter, _ in bucket]
        own = bucket[0][0].new_zeros(sum(counts))
        for (_, view), place in zip(bucket, own.split_with_sizes(counts), strict=True):
            place[: local(view).numel()] = local(view).reshape(-1)
        parts = own.new_empty(size * len(own))
        distributed.all_gather_single(parts, own, group)
        for rank, part in enumerate(parts.view(size, -1)):
            for (parameter, _), place in zip(bucket, part.split_with_sizes(counts), strict=True):
                rows = len(place) // parameter[0].numel()
                target = parameter[rank * rows : (rank + 1) * rows]
                target.copy_(place[: target.numel()].view(target.shape))


class Reducer:
    """Adds gradients up over ranks for DDP.

    Attributes:
        sums: of one backward pass before they are rounded, by parameter, while any are wanted.
        buckets: bytes of each bucket of the last backward pass, by storage; DDP keeps them.
    """

    def __init__(
        self,
        group: distributed.ProcessGroup | None,
        reduction: Reduction,
        accumulations: list[Accumulation],
    ) -> None:
        self.sums: dict[Tensor, Tensor] = {}
        self.buckets: dict[int, int] = {}
        self._group = group
        self._reduction = reduction
        self._accumulations = accumulations

    def reduce(self, bucket: GradBucket) -> Future[Tensor]:
        """Reduce a bucket: DDP's communication hook."""
        rounded, parameters = bucket.buffer(), bucket.parameters()
        storage = rounded.untyped_storage()
        self.buckets[storage._cdata] = storage.nbytes()
        counts = [parameter.numel() for parameter in parameters]
        sums = rounded.to(self._reduction.dtype)

        def finish(_: object) -> Tensor:
            if self._reduction.divisor > 1:
                sums.div_(self._reduction.divisor)
            if not all(accumulation.closed for accumulation in self._accumulations):
                for parameter, part in zip(parameters, sums.split_with_sizes(counts), strict=True):
                    self.sums[parameter] = part.view(parameter.shape)
            rounded.copy_(sums)
            return rounded

        work = distributed.all_reduce(sums, group=self._group, async_op=True)
        future: Future[Tensor] = work.get_future().then(finish)
        return future


def _buckets(pairs: list[Pair]) -> Iterator[list[Pair]]:
    """Put neighbours of one dtype together up to ``BUCKET_BYTES``."""
    bucket: list[Pair] = []
    used = 0
    for parameter, view in pairs:
        full = used + parameter.nbytes > BUCKET_BYTES
        if bucket and (full or parameter.dtype != bucket[0][0].dtype):
            yield bucket
            bucket, used = [], 0
        bucket.append((parameter, view))
        used += parameter.nbytes
    if bucket:
        yield bucket

"""Sharded parameters: the part that a rank holds, and where it lies in the global tensor.

A rank's part of a ``DTensor`` must be one box of the global shape. Its elements then have global
row-major indices that follow from a start and a few strides, which is all that noise needs. Whole
tensors are the box that begins at 0, so the core has one way for both.

``torch.distributed.tensor`` takes as long to import as torch itself, so it waits for a DTensor.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from halfword import noise

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement


@dataclass(frozen=True)
class Place:
    """Where the elements of a shard, in its row-major order, lie in the global tensor.

    Attributes:
        start: the global index of the first.
        run: how many follow one another globally where the shard is several such runs.
        outer: (size, global stride) of each dimension outside the runs, the slowest first; empty
            where the shard is one run.
    """

    start: int = 0
    run: int = 1
    outer: tuple[tuple[int, int], ...] = ()

    def noise(self, key: tuple[int, int], first: int, count: int, device: torch.device) -> Tensor:
        """Return random bits as ``noise.bits``, of elements counted within the shard."""
        if not self.outer:
            return noise.bits(key, self.start + first, count, device)
        return noise.bits_at(key, self.indices(first, count, device))

    def indices(self, first: int, count: int, device: torch.device | str = "cpu") -> Tensor:
        """Return the global indices of ``count`` elements from the shard's ``first`` one on.

        >>> Place(start=2, run=2, outer=((3, 8),)).indices(1, 4)
        tensor([ 3, 10, 11, 18])
        """
        own = torch.arange(first, first + count, dtype=torch.int64, device=device)
        if not self.outer:
            return own + self.start
        index, row = own % self.run + self.start, own // self.run
        for size, stride in reversed(self.outer):
            index += row % size * stride
            row = row // size
        return index


WHOLE = Place()


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor, though its placements may replicate it."""
    if type(tensor) in (Tensor, Parameter):
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def local(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor: a plain one itself, a DTensor's part detached."""
    if not is_sharded(tensor):
        return tensor
    part: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return part.detach()


def place_of(tensor: Tensor, label: str) -> Place:
    """Return where this rank's part of a tensor lies.

    Raises:
        ValueError: the part is not one box of the global shape.
    """
    if not is_sharded(tensor):
        return WHOLE
    mesh, placements = layout(tensor)
    try:
        box = _box(tensor.shape, mesh, placements)
    except ValueError:
        raise ValueError(
            f"{label} has placements {tuple(placements)}: a shard must be one box of the tensor; "
            "use Shard or Replicate"
        ) from None
    return _place(tensor.shape, box)


def check_blocks(tensor: Tensor, block: int, label: str) -> None:
    """Raise ValueError where this rank's part cuts a block of the last dimension."""
    if block == 1 or not is_sharded(tensor):
        return
    begin, end = _box(tensor.shape, *layout(tensor))[-1]
    if begin % block or end % block:
        raise ValueError(
            f"{label}: its shard has columns {begin} to {end}, which cuts a block of {block}; "
            "shard rows, or choose other moments"
        )


def layout(tensor: Tensor) -> tuple["DeviceMesh", Sequence["Placement"]]:
    """Return the mesh and the placements of a DTensor."""
    return tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]


def part_of(values: Tensor, like: Tensor) -> Tensor:
    """Return the part of ``values`` that belongs to this rank's part of ``like``.

    Args:
        values: whole, or a DTensor of any placements, which may then be communicated; its last
            dimension may be divided by a block.
        like: the tensor, plain or a DTensor, whose layout counts.
    """
    if not is_sharded(like):
        return gather(values)
    if is_sharded(values) and layout(values) == layout(like):
        return local(values)
    return _cut(gather(values), *layout(like))


def shard(whole: Tensor, mesh: "DeviceMesh", placements: Sequence["Placement"]) -> Tensor:
    """Return a DTensor whose part on this rank is a view of ``whole``, which all ranks hold.

    Of a parameter it is one too.
    """
    part = _cut(whole.detach(), mesh, placements)
    # torch copies and pickles only what was made from the beginning of a storage, unlike a part.
    start = part.new_empty(()).expand(part.shape)
    sharded: Any = _from_local(start, mesh, placements, whole.shape, whole.stride())
    if isinstance(whole, Parameter):
        sharded = Parameter(sharded, whole.requires_grad)
    sharded._local_tensor = part  # as FSDP2 does
    return sharded  # type: ignore[no-any-return]


def empty(shape: torch.Size, dtype: torch.dtype, like: Tensor | None) -> Tensor:
    """Return an empty tensor of a shape, laid out as ``like``; a plain one is on the CPU."""
    if like is None or not is_sharded(like) or not shape:
        return torch.empty(shape, dtype=dtype)
    part = [end - begin for begin, end in _box(shape, *layout(like))]
    return wrap(torch.empty(part, dtype=dtype), like, shape)


def offset_of(tensor: Tensor) -> tuple[int, ...]:
    """Return where this rank's part begins along each dimension."""
    if not is_sharded(tensor):
        return (0,) * tensor.ndim
    return tuple(begin for begin, _ in _box(tensor.shape, *layout(tensor)))


def wrap(part: Tensor, like: Tensor, shape: torch.Size | None = None) -> Tensor:
    """Return this rank's part as a tensor laid out as ``like``, of its shape or of another."""
    if not is_sharded(like):
        return part
    stride = like.stride() if shape is None else _strides(shape)
    return _from_local(part, *layout(like), like.shape if shape is None else shape, stride)


def gather(tensor: Tensor) -> Tensor:
    """Return a tensor whole on every rank, detached; a DTensor's ranks must all call it.

    It travels as bytes, for gloo and nccl refuse int16.
    """
    if not is_sharded(tensor):
        return tensor.detach()
    part = local(tensor).contiguous().unsqueeze(-1).view(torch.uint8)  # (*shard, bytes) uint8
    shape = torch.Size((*tensor.shape, tensor.dtype.itemsize))
    sharded: Any = wrap(part, tensor, shape)
    whole: Tensor = sharded.full_tensor().view(tensor.dtype).squeeze(-1)
    return whole


def aligned(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Return a gradient with the placements of its parameter, which a partial sum may lack."""
    if not is_sharded(gradient) or layout(gradient) == layout(parameter):
        return gradient
    redistributed: Tensor = gradient.redistribute(*layout(parameter))  # type: ignore[attr-defined]
    return redistributed


def groups_of(tensor: Tensor, *, sharded_only: bool) -> tuple["ProcessGroup", ...]:
    """Return a process group for each dimension of a tensor's mesh, or of those that shard it."""
    if not is_sharded(tensor):
        return ()
    mesh, placements = layout(tensor)
    return tuple(
        mesh.get_group(dim)
        for dim, placement in enumerate(placements)
        if not (sharded_only and placement.is_replicate())
    )


def _from_local(
    part: Tensor,
    mesh: "DeviceMesh",
    placements: Sequence["Placement"],
    shape: torch.Size,
    stride: tuple[int, ...],
) -> Tensor:
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)


def _cut(whole: Tensor, mesh: "DeviceMesh", placements: Sequence["Placement"]) -> Tensor:
    for dim, (begin, end) in enumerate(_box(whole.shape, mesh, placements)):
        whole = whole.narrow(dim, begin, end - begin)
    return whole


def _box(
    shape: Sequence[int], mesh: "DeviceMesh", placements: Sequence["Placement"]
) -> list[tuple[int, int]]:
    """Return begin and end along each dimension; raise ValueError for what is not a box."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None  # a DTensor's parameter is used on the ranks of its mesh
    held: list[Sequence[int]] = [range(size) for size in shape]
    for rank, size, placement in zip(coordinate, mesh.shape, placements, strict=True):
        if placement.is_replicate():
            continue
        if placement.is_partial():
            raise ValueError(placement)
        dim: int = placement.dim  # type: ignore[attr-defined]
        factor: int = getattr(placement, "split_factor", 1)
        if factor == 1:
            held[dim] = chunk(held[dim], size, rank)
        else:  # FSDP2 over tensor parallelism cuts the pieces of a later mesh dimension
            pieces = [chunk(held[dim], factor, number) for number in range(factor)]
            held[dim] = [index for piece in pieces for index in chunk(piece, size, rank)]
    if any(len(index) and index[-1] - index[0] + 1 != len(index) for index in held):
        raise ValueError(placements)
    return [
        (index[0], index[-1] + 1) if index else (size, size)  # as torch has it
        for index, size in zip(held, shape, strict=True)
    ]


def chunk(index: Sequence[int], count: int, position: int) -> Sequence[int]:
    """Return a chunk as torch cuts them, all but the last equal; late ones may be empty."""
    size = math.ceil(len(index) / count)
    return index[position * size : (position + 1) * size]


def _place(shape: Sequence[int], box: Sequence[tuple[int, int]]) -> Place:
    strides = _strides(shape)
    sizes = [end - begin for begin, end in box]
    start = sum(begin * stride for (begin, _), stride in zip(box, strides, strict=True))
    cut = max((d for d, size in enumerate(shape) if sizes[d] != size), default=0)
    outer = tuple((sizes[d], strides[d]) for d in range(cut) if sizes[d] != 1)
    return Place(start, math.prod(sizes[cut:]), outer) if outer else Place(start)


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the row-major strides of a shape."""
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))

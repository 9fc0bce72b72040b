"""Tensors on disk: torch's Distributed Checkpoint in its safetensors layout, no pickle.

Every rank writes its parts, replicated ones once, to files of its own. A part is called a *piece*,
and told by a line: name, dtype, offset and shape, and the SHA-256 of its bytes. The lines of a
checkpoint together give its fingerprint, so no rank has to see all tensors.
"""

import hashlib
import json
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from halfword.checkpoint.errors import CheckpointError
from halfword.checkpoint.ranks import Ranks
from halfword.shards import local, offset_of

Piece = tuple[str, tuple[int, ...]]  # a tensor's name and where its part begins in it
Make = Callable[[str, torch.Size, torch.dtype], Tensor]


def write_tensors(folder: Path, tensors: Mapping[str, Tensor], ranks: Ranks) -> None:
    """Write all parts of tensors into files of a folder; all ranks must.

    Raises:
        CheckpointError: a rank could not write.
    """
    writer = HuggingFaceStorageWriter(
        str(folder),
        fqn_to_index_mapping={name: 1 if name.startswith("model.") else 2 for name in tensors},
        save_distributed=True,
    )
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        if not tensor.numel():  # DCP writes nothing of a DTensor without elements
            contiguous[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no process group exists is meant
        try:
            save(
                contiguous,
                storage_writer=writer,
                process_group=ranks.group,
                no_dist=ranks.group is None,
            )
        except CheckpointException as error:  # DCP's, for whatever went wrong on a rank
            cause = next(iter(error.failures.values()))[0]
            raise CheckpointError(folder, f"could not be written: {cause}") from None


def read_tensors(folder: Path, make: Make) -> dict[str, Tensor]:
    """Return every tensor of a folder, this rank's part of those that ``make`` makes sharded."""
    reader = HuggingFaceStorageReader(str(folder))
    entries = reader.read_metadata().state_dict_metadata
    tensors: dict[str, Any] = {
        name: make(name, entry.size, entry.properties.dtype)  # type: ignore[union-attr]
        for name, entry in entries.items()
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    return tensors


def files_of(folder: Path, rank: int) -> list[Path]:
    """Return the files that a rank wrote, as DCP names them."""
    return sorted(folder.glob(f"shard-{rank + 1:05d}-*"))


def read_pieces(files: Iterable[Path]) -> dict[Piece, str]:
    """Return the line of every piece in some files, which must have been verified."""
    lines = {}
    for path in files:
        with safe_open(str(path), framework="pt") as file:
            offsets = json.loads((file.metadata() or {}).get("DCP_SHARDING_INFO", "{}"))
            for name in file.keys():  # noqa: SIM118 - not a mapping
                offset = tuple(offsets[name]["saved_offsets"])
                lines[name, offset] = _line(name, offset, file.get_tensor(name))
    return lines


def pieces_of(tensors: Mapping[str, Tensor], wanted: Iterable[Piece]) -> dict[Piece, str]:
    """Return the lines of those wanted pieces that this rank has in memory."""
    lines = {}
    for name, offset in wanted:
        if name in tensors and offset_of(tensors[name]) == offset:
            lines[name, offset] = _line(name, offset, local(tensors[name]))
    return lines


def check_whole(folder: Path, tensors: Mapping[str, Tensor], lines: Iterable[str]) -> None:
    """Raise CheckpointError where the pieces of a tensor are not all of it."""
    found: Counter[str] = Counter()
    names = set()
    for line in lines:
        name, _, _, shape, _ = json.loads(line)
        names.add(name)
        found[name] += torch.Size(shape).numel()
    for name, tensor in tensors.items():
        if name not in names or found[name] != tensor.numel():
            raise CheckpointError(folder, f"{name} was not written whole; check the disk")


def fingerprint_of(lines: Iterable[str]) -> str:
    """Return the SHA-256 over the lines of all pieces, in their order."""
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


def _line(name: str, offset: tuple[int, ...], part: Tensor) -> str:
    part = part.detach().cpu().contiguous()
    digest = hashlib.sha256()
    if part.numel():
        digest.update(part.reshape(-1).view(torch.uint8).numpy().data)
    dtype = str(part.dtype).removeprefix("torch.")
    return json.dumps([name, dtype, list(offset), list(part.shape), digest.hexdigest()])

"""One checkpoint on disk: a folder that is either whole or not there.

    step-00000060/
      shard-00001-model-00001-of-00002.safetensors   the first rank's part of weights and buffers
      shard-00001-model-00002-of-00002.safetensors   of remainders or masters, moments, steps
      shard-00002-...                                the other ranks' parts
      state.json                                     everything that is not a tensor
      manifest.json                                  written last: sizes and SHA-256 of the others

A folder is written aside, synced, read back, and only then renamed, so that a save that dies at any
point costs nothing. Nothing in a folder is parsed before its hash has been compared. Each rank
looks after the files that it wrote, and verifies a share of those that it reads.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halfword.checkpoint.errors import CheckpointError
from halfword.checkpoint.ranks import Ranks
from halfword.checkpoint.tensors import (
    Make,
    check_whole,
    files_of,
    fingerprint_of,
    pieces_of,
    read_pieces,
    read_tensors,
    write_tensors,
)

FORMAT = "halfword checkpoint"
VERSION = 2
MANIFEST = "manifest.json"
STATE = "state.json"

Described = dict[str, dict[str, Any]]  # size in bytes and SHA-256 by file name


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself.

    Attributes:
        step: steps done when it was made.
        files: size in bytes and SHA-256 by file name.
        fingerprint: SHA-256 over all pieces of tensors together, which ties weights to remainders
            and moments.
    """

    step: int
    files: Described
    fingerprint: str


def write(
    folder: Path,
    step: int,
    tensors: Mapping[str, Tensor],
    state: Mapping[str, Any],
    ranks: Ranks | None = None,
) -> None:
    """Write a checkpoint; ``folder`` appears whole or not at all.

    Args:
        folder: its final path, the same for all ranks; must not exist.
        step: steps done.
        tensors: by name; DTensors, or plain ones that are equal on all ranks. ``model.*`` and the
            others go to separate files.
        state: JSON values; the first rank's count.
        ranks: those that call this together; None for one process.

    Raises:
        CheckpointError: what was read back is not what was written.
        OSError: the disk is full, or the folder not writable; what was written is removed.
    """
    ranks = ranks or Ranks()
    aside = ranks.first(lambda: _begin(folder))
    try:
        write_tensors(aside, tensors, ranks)
        written = ranks.each(lambda: _finish_own(folder, aside, tensors, ranks.rank))
        ranks.first(lambda: _finish(folder, aside, step, tensors, state, written))
    except BaseException:
        if ranks.is_first:
            shutil.rmtree(aside, ignore_errors=True)
        raise


def read(
    folder: Path, make: Make | None = None, ranks: Ranks | None = None
) -> tuple[Manifest, dict[str, Tensor], dict[str, Any]]:
    """Return a checkpoint's manifest, tensors and JSON values, all verified.

    Args:
        folder: the checkpoint.
        make: ``(name, shape, dtype) -> tensor``, empty, to be filled with what was saved: whole or,
            as a DTensor, in part. By default all are whole, on the CPU.
        ranks: those that call this together and share the work of verifying.

    Raises:
        CheckpointError: the folder is foreign, damaged, incomplete, mixed or of another version.
    """
    ranks = ranks or Ranks()
    manifest = verify(folder, ranks)
    own = sorted(name for name in manifest.files if name.startswith("shard-"))
    own = own[ranks.rank :: ranks.size]
    lines = ranks.each(lambda: list(read_pieces(folder / name for name in own).values()))
    if fingerprint_of(line for part in lines for line in part) != manifest.fingerprint:
        raise CheckpointError(folder, "its tensors do not belong together; use another checkpoint")
    tensors = read_tensors(folder, make or _whole)
    return manifest, tensors, json.loads((folder / STATE).read_text())


def verify(folder: Path, ranks: Ranks | None = None) -> Manifest:
    """Return a checkpoint's manifest after comparing every file with it.

    Raises:
        CheckpointError: as ``read`` does.
    """
    ranks = ranks or Ranks()
    manifest = read_manifest(folder)
    present = {path.name for path in folder.iterdir()} - {MANIFEST}
    for name in sorted(present ^ manifest.files.keys()):
        problem = "is missing" if name in manifest.files else "does not belong to it"
        raise CheckpointError(folder, f"{name} {problem}; use another checkpoint")
    own = sorted(manifest.files)[ranks.rank :: ranks.size]
    for found in ranks.each(lambda: {name: _describe(folder / name) for name in own}):
        for name, described in found.items():
            if described != manifest.files[name]:
                raise CheckpointError(folder, f"{name} is damaged; use another checkpoint")
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """Return a checkpoint's manifest, itself checked; the other files are not looked at.

    Raises:
        CheckpointError: there is none, it is damaged, or another version wrote it.
    """
    try:
        content = json.loads((folder / MANIFEST).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(folder, f"no checkpoint, for it has no {MANIFEST}") from None
    except (OSError, ValueError):
        raise CheckpointError(folder, f"{MANIFEST} is damaged; use another checkpoint") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(folder, f"no checkpoint of halfword, by its {MANIFEST}")
    version = content.get("version")
    if version != VERSION:
        fix = "use the one that wrote it" if version == 1 else "update it"
        raise CheckpointError(folder, f"version {version}; this halfword reads {VERSION}: {fix}")
    if content != _signed({key: value for key, value in content.items() if key != "sha256"}):
        raise CheckpointError(folder, f"{MANIFEST} is damaged; use another checkpoint")
    return Manifest(content["step"], content["files"], content["fingerprint"])


def _begin(folder: Path) -> Path:
    aside = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    return aside


def _finish_own(
    folder: Path, aside: Path, tensors: Mapping[str, Tensor], rank: int
) -> tuple[Described, list[str]]:
    """Sync and read back what a rank wrote; return its files and the lines of its pieces."""
    own = files_of(aside, rank)
    for path in own:
        _sync(path)
    pieces = read_pieces(own)
    if pieces_of(tensors, pieces) != pieces:
        raise CheckpointError(folder, "what was read back is not what was saved; check the disk")
    return {path.name: _describe(path) for path in own}, list(pieces.values())


def _finish(
    folder: Path,
    aside: Path,
    step: int,
    tensors: Mapping[str, Tensor],
    state: Mapping[str, Any],
    written: list[tuple[Described, list[str]]],
) -> None:
    """Write what there is once, and let the checkpoint appear."""
    lines = [line for _, part in written for line in part]
    check_whole(folder, tensors, lines)
    _write_json(aside / STATE, state)
    files = {STATE: _describe(aside / STATE)}
    for described, _ in written:
        files |= described
    content = {"step": step, "files": files, "fingerprint": fingerprint_of(lines)}
    _write_json(aside / MANIFEST, _signed({"format": FORMAT, "version": VERSION} | content))
    _sync(aside)
    aside.rename(folder)
    _sync(folder.parent)


def _whole(name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def _signed(content: dict[str, Any]) -> dict[str, Any]:
    """Add the SHA-256 of a manifest's own content, so that an edit of it shows."""
    text = json.dumps(content, sort_keys=True)
    return content | {"sha256": hashlib.sha256(text.encode()).hexdigest()}


def _describe(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n")
    _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

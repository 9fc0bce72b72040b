"""One checkpoint on disk: a folder that is either whole or not there.

    step-00000060/
      shard-00001-model-00001-of-00002.safetensors   weights and buffers
      shard-00001-model-00002-of-00002.safetensors   remainders or masters, moments, steps
      state.json                                     everything that is not a tensor
      manifest.json                                  written last: sizes and SHA-256 of the others

Tensors go through torch's Distributed Checkpoint in its safetensors layout: no pickle is written or
read. A folder is written aside, synced, read back, and only then renamed, so that a save that dies
at any point costs nothing. Nothing in a folder is parsed before its hash has been compared.
"""

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

FORMAT = "halfword checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
STATE = "state.json"


class CheckpointError(ValueError):
    """A folder that cannot be used as a checkpoint, told in one line that names it.

    Attributes:
        problem: the line without the folder.
    """

    def __init__(self, folder: Path, problem: str) -> None:
        super().__init__(f"{folder}: {problem}")
        self.problem = problem


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself.

    Attributes:
        step: steps done when it was made.
        files: size in bytes and SHA-256 by file name.
        fingerprint: SHA-256 over all tensors together, which ties weights to remainders and
            moments.
    """

    step: int
    files: dict[str, dict[str, Any]]
    fingerprint: str


def write(folder: Path, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Write a checkpoint; ``folder`` appears whole or not at all.

    Args:
        folder: its final path; must not exist.
        step: steps done.
        tensors: by name; ``model.*`` and the others go to separate files.
        state: JSON values.

    Raises:
        CheckpointError: what was read back is not what was written.
        OSError: the disk is full, or the folder not writable; what was written is removed.
    """
    aside = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        _write_tensors(aside, tensors)
        _write_json(aside / STATE, state)
        files = {path.name: _describe(path) for path in sorted(aside.iterdir())}
        fingerprint = fingerprint_of(tensors)
        if fingerprint_of(_read_tensors(aside)) != fingerprint:
            raise CheckpointError(
                folder, "what was read back is not what was saved; check the disk"
            )
        content = {"step": step, "files": files, "fingerprint": fingerprint}
        _write_json(aside / MANIFEST, _signed({"format": FORMAT, "version": VERSION} | content))
        _sync(aside)
        aside.rename(folder)
        _sync(folder.parent)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def read(folder: Path) -> tuple[Manifest, dict[str, Tensor], dict[str, Any]]:
    """Return a checkpoint's manifest, tensors and JSON values, all verified.

    Raises:
        CheckpointError: the folder is foreign, damaged, incomplete, mixed or of a newer version.
    """
    manifest = verify(folder)
    state = json.loads((folder / STATE).read_text())
    tensors = _read_tensors(folder)
    if fingerprint_of(tensors) != manifest.fingerprint:
        raise CheckpointError(folder, "its tensors do not belong together; use another checkpoint")
    return manifest, tensors, state


def verify(folder: Path) -> Manifest:
    """Return a checkpoint's manifest after comparing every file with it.

    Raises:
        CheckpointError: as ``read`` does.
    """
    manifest = read_manifest(folder)
    found = {path.name for path in folder.iterdir()} - {MANIFEST}
    for name in sorted(found ^ manifest.files.keys()):
        problem = "is missing" if name in manifest.files else "does not belong to it"
        raise CheckpointError(folder, f"{name} {problem}; use another checkpoint")
    for name, expected in manifest.files.items():
        if _describe(folder / name) != expected:
            raise CheckpointError(folder, f"{name} is damaged; use another checkpoint")
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """Return a checkpoint's manifest, itself checked; the other files are not looked at.

    Raises:
        CheckpointError: there is none, it is damaged, or a newer version wrote it.
    """
    try:
        content = json.loads((folder / MANIFEST).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(folder, f"no checkpoint, for it has no {MANIFEST}") from None
    except (OSError, ValueError):
        raise CheckpointError(folder, f"{MANIFEST} is damaged; use another checkpoint") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(folder, f"no checkpoint of halfword, by its {MANIFEST}")
    if not isinstance(content.get("version"), int) or content["version"] > VERSION:
        raise CheckpointError(
            folder, f"version {content.get('version')}; this halfword reads {VERSION}: update it"
        )
    if content != _signed({key: value for key, value in content.items() if key != "sha256"}):
        raise CheckpointError(folder, f"{MANIFEST} is damaged; use another checkpoint")
    return Manifest(content["step"], content["files"], content["fingerprint"])


def fingerprint_of(tensors: Mapping[str, Tensor]) -> str:
    """Return a SHA-256 over names, dtypes, shapes and bytes of tensors, in the order of names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        if tensor.numel():
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _write_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    writer = HuggingFaceStorageWriter(
        str(folder),
        fqn_to_index_mapping={name: 1 if name.startswith("model.") else 2 for name in tensors},
        save_distributed=True,
    )
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no process group exists is meant
        try:
            save(contiguous, storage_writer=writer, no_dist=True)
        except CheckpointException as error:  # DCP's, for whatever went wrong on a rank
            cause = next(iter(error.failures.values()))[0]
            raise CheckpointError(folder, f"could not be written: {cause}") from None
    for path in folder.iterdir():
        _sync(path)


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    reader = HuggingFaceStorageReader(str(folder))
    entries = reader.read_metadata().state_dict_metadata
    tensors: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)  # type: ignore[union-attr]
        for name, entry in entries.items()
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    return tensors


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

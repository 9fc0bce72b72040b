"""Checkpoints that resume to the last bit and never cost the previous one."""

from halfword.checkpoint.contents import component_of, flatten, restore
from halfword.checkpoint.folder import CheckpointError, Manifest, read, read_manifest, verify, write
from halfword.checkpoint.writer import Writer, checkpoints, latest

__all__ = [
    "CheckpointError",
    "Manifest",
    "Writer",
    "checkpoints",
    "component_of",
    "flatten",
    "latest",
    "read",
    "read_manifest",
    "restore",
    "verify",
    "write",
]

"""Checkpoints that resume to the last bit and never cost the previous one."""

from halfword.checkpoint.contents import component_of, flatten, restore, targets
from halfword.checkpoint.errors import CheckpointError
from halfword.checkpoint.folder import Manifest, read, read_manifest, verify, write
from halfword.checkpoint.ranks import Ranks
from halfword.checkpoint.writer import Writer, checkpoints, latest

__all__ = [
    "CheckpointError",
    "Manifest",
    "Ranks",
    "Writer",
    "checkpoints",
    "component_of",
    "flatten",
    "latest",
    "read",
    "read_manifest",
    "restore",
    "targets",
    "verify",
    "write",
]

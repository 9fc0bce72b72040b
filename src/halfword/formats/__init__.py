"""Number formats: how FP32 values are kept; ``FORMATS`` by name, and what settings choose."""

import torch

from halfword.formats.block8 import BLOCK, SMALLEST, int8, uint8
from halfword.formats.format import Format, Plane
from halfword.formats.plain import bf16, fp32
from halfword.formats.shadow import bf16_shadow, fp16_shadow
from halfword.formats.split import split, split24
from halfword.formats.stochastic import bf16_sr

FORMATS: dict[str, Format] = {
    format.name: format
    for format in (fp32, bf16, bf16_sr, int8, uint8, split, split24, bf16_shadow, fp16_shadow)
}

MASTER_WEIGHTS: dict[torch.dtype, dict[str, Format]] = {
    torch.bfloat16: {
        "auto": split,
        "split": split,
        "split24": split24,
        "fp32": bf16_shadow,
        "bf16": bf16,
        "bf16-sr": bf16_sr,
    },
    torch.float16: {"auto": fp16_shadow, "fp32": fp16_shadow},
    # An FP32 parameter is its own master under every setting.
    torch.float32: dict.fromkeys(("auto", "split", "split24", "fp32", "bf16", "bf16-sr"), fp32),
}
"""The format that a ``master_weights`` setting means, by the parameter's dtype."""

MOMENTS: dict[str, Format] = {"fp32": fp32, "bf16": bf16, "bf16-sr": bf16_sr, "int8": int8}
"""The format that a ``moments`` setting means for a large matrix of signed values."""


def moment_format(setting: str, signed: bool, shape: torch.Size) -> Format:
    """Return the format of a moment of a parameter with this global shape.

    ``int8`` leaves vectors and small tensors in FP32, which costs next to nothing, and what cannot
    be cut into whole blocks in ``bf16-sr``.
    """
    format = MOMENTS[setting]
    if format is not int8:
        return format
    if len(shape) < 2 or shape.numel() < SMALLEST:
        return fp32
    if shape[-1] % BLOCK:
        return bf16_sr
    return int8 if signed else uint8


__all__ = ["FORMATS", "MASTER_WEIGHTS", "MOMENTS", "Format", "Plane", "moment_format"]

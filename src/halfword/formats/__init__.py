"""Number formats: how FP32 values are kept; ``FORMATS`` by name, and what settings choose."""

import torch

from halfword.formats.format import Format, Plane
from halfword.formats.plain import bf16, fp32
from halfword.formats.shadow import bf16_shadow, fp16_shadow
from halfword.formats.split import split, split24
from halfword.formats.stochastic import bf16_sr

FORMATS: dict[str, Format] = {
    format.name: format
    for format in (fp32, bf16, bf16_sr, split, split24, bf16_shadow, fp16_shadow)
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

MOMENTS: dict[str, Format] = {"fp32": fp32, "bf16": bf16, "bf16-sr": bf16_sr}
"""The format that a ``moments`` setting means."""

__all__ = ["FORMATS", "MASTER_WEIGHTS", "MOMENTS", "Format", "Plane"]

"""Bit patterns for tests: building values from them, comparing by them."""

import csv
from pathlib import Path

import torch
from torch import Tensor

GOLDEN = Path(__file__).parent / "golden"


def from_bits(patterns: list[int]) -> Tensor:
    """Return the FP32 values with these unsigned 32-bit patterns."""
    signed = [p - (1 << 32) if p >> 31 else p for p in patterns]
    return torch.tensor(signed, dtype=torch.int32).view(torch.float32)


def bits(values: Tensor) -> Tensor:
    """Return the bit patterns of a tensor of 16- or 32-bit floats, all NaNs as one."""
    integer = torch.int16 if values.dtype.itemsize == 2 else torch.int32
    return torch.where(values.isnan(), torch.nan, values).contiguous().view(integer)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors agree bit for bit, NaNs counted as equal."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def golden_rows(name: str) -> list[dict[str, str]]:
    """Return the rows of a golden file."""
    with open(GOLDEN / name, newline="") as file:
        return list(csv.DictReader(file))


def golden_column(rows: list[dict[str, str]], name: str) -> list[int]:
    """Return a column of hexadecimal patterns."""
    return [int(row[name], 16) for row in rows]


SPECIAL = from_bits(
    [
        *(0x00000000, 0x80000000, 0x00000001, 0x807FFFFF, 0x00800000, 0x3F800000, 0xBF808000),
        *(0x3F808001, 0x3F7FFFFF, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000),
        *(0xFF800000, 0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0xFFBFFFFF, 0x40490FDB),
    ]
)
"""Zeros, denormals, ties, values that overflow BF16, Inf, and every kind of NaN."""

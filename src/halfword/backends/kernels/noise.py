"""Random bits as a pure function of key and element index; noise.py of the package defines it."""

import triton
import triton.language as tl


@triton.jit
def key(stream, step):
    """Return the 64-bit key of a stream at a step, which is a float64."""
    z = stream.to(tl.uint64) + step.to(tl.uint64) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def tile_bits(key, first, TILE: tl.constexpr):
    """Return 16 bits, as int32, for each element of a tile; ``first`` is a multiple of TILE.

    A word serves two neighbours, and no tile crosses a change of the index's upper word.
    """
    pair = (first >> 1) + tl.arange(0, TILE // 2)
    words = _words(key, pair.to(tl.uint32), (first >> 33).to(tl.uint32))
    halves = tl.join(words & 0xFFFF, words >> 16)
    return tl.reshape(halves, (TILE,)).to(tl.int32)


@triton.jit
def bits(key, index):
    """Return 16 bits, as int32, for each 64-bit index."""
    words = _words(key, (index >> 1).to(tl.uint32), (index >> 33).to(tl.uint32))
    return tl.where((index & 1) == 0, words & 0xFFFF, words >> 16).to(tl.int32)


@triton.jit
def _words(key, low, high):
    inner = _mix(low ^ key.to(tl.uint32))
    return _mix(inner + ((high * 0x9E3779B9) ^ (key >> 32).to(tl.uint32)))


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)

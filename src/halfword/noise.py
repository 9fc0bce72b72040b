"""Counter-based random bits: a pure function of what is rounded, never of when or where.

The bits of an element depend on (seed, step, parameter identity, state name, element index) and on
nothing else, so they are the same on every replica, for every sharding, after every resume, and
torch's generators are never touched. docs/numerics.md states the function; all of it is 32-bit
arithmetic modulo 2^32 per element, because that is what vector units are fast at.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor

_MASK64 = (1 << 64) - 1
_GOLDEN64 = 0x9E3779B97F4A7C15
_GOLDEN32 = 0x9E3779B9


def identity_of_name(name: str) -> int:
    """Return the 64-bit identity of a parameter with a fully qualified name."""
    return _hash64(b"name", name.encode())


def identities_of_names(names: Iterable[str], earlier: Iterable[str] = ()) -> list[int]:
    """Return the identities of named parameters.

    Two models in one optimizer may use a name twice, here or among the names of ``earlier`` groups;
    each further use counts as another name, so that they do not share noise.
    """
    uses = Counter(earlier)
    identities = []
    for name in names:
        identities.append(identity_of_name(f"{name}\0{uses[name]}" if uses[name] else name))
        uses[name] += 1
    return identities


def identity_of_position(position: int) -> int:
    """Return the 64-bit identity of an unnamed parameter: its position over all groups."""
    return _hash64(b"position", position.to_bytes(8, "little"))


def stream(seed: int, identity: int, state: str) -> int:
    """Return the 64-bit number that selects the noise of one state of one parameter.

    Args:
        seed: the optimizer's seed, any 64-bit integer.
        identity: the parameter's 64-bit identity.
        state: the name of what is rounded: a slot such as ``exp_avg``, or ``weight``.
    """
    words = (seed & _MASK64).to_bytes(8, "little") + identity.to_bytes(8, "little")
    return _hash64(b"stream", words + state.encode())


def key(stream: int, step: int) -> tuple[int, int]:
    """Return two 32-bit words that select a stream's noise at ``step``, counted from 1."""
    mixed = _splitmix64((stream + step * _GOLDEN64) & _MASK64)
    return mixed & 0xFFFFFFFF, mixed >> 32


def bits(
    key: tuple[int, int], start: int, count: int, device: torch.device | str = "cpu"
) -> Tensor:
    """Return 16 random bits for each of ``count`` elements from global index ``start`` on.

    Returns:
        int32 tensor of shape ``(count,)``, uniform over 0 to 65535.
    """
    pair = torch.arange(start >> 1, (start + count + 1) >> 1, dtype=torch.int64, device=device)
    words = _words(key, pair)
    halves = torch.stack((words & 0xFFFF, _shift_right(words, 16)), dim=-1).view(-1)
    return halves[start & 1 :][:count]


def bits_at(key: tuple[int, int], index: Tensor) -> Tensor:
    """Return the bits, as ``bits`` does, of any global indices, an int64 tensor."""
    words = _words(key, index >> 1)
    return torch.where((index & 1).bool(), _shift_right(words, 16), words & 0xFFFF)


def _words(key: tuple[int, int], pair: Tensor) -> Tensor:
    """Return the 32 bits that two neighbours share, for each number of a pair."""
    low, high = pair.to(torch.int32), (pair >> 32).to(torch.int32)
    inner = _lowbias32(low ^ _int32(key[0]))
    return _lowbias32(inner + ((high * _int32(_GOLDEN32)) ^ _int32(key[1])))


def _hash64(domain: bytes, data: bytes) -> int:
    digest = hashlib.blake2b(data, digest_size=8, person=domain.ljust(16, b"\0")).digest()
    return int.from_bytes(digest, "little")


def _splitmix64(z: int) -> int:
    """Finalizer of splitmix64 (Steele, Lea, Flood, "Fast splittable PRNGs", OOPSLA 2014)."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def _lowbias32(x: Tensor) -> Tensor:
    """Mix 32 bits by a bijection of very low bias (Wellons, hash-prospector, 2018)."""
    x = (x ^ _shift_right(x, 16)) * 0x7FEB352D
    x = (x ^ _shift_right(x, 15)) * _int32(0x846CA68B)
    return x ^ _shift_right(x, 16)


def _shift_right(x: Tensor, count: int) -> Tensor:
    """Shift unsigned: ``>>`` on int32 would repeat the sign bit."""
    return (x >> count) & ((1 << (32 - count)) - 1)


def _int32(word: int) -> int:
    """Return the signed integer with the bit pattern of the unsigned 32-bit ``word``."""
    return word - (1 << 32) if word >= 1 << 31 else word

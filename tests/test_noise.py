from itertools import pairwise

import pytest
import torch

from halfword import noise


def _bits(key: tuple[int, int], count: int = 1 << 20, start: int = 0) -> torch.Tensor:
    return noise.bits(key, start, count)


def _key(seed: int = 0, name: str = "w", state: str = "exp_avg", step: int = 1) -> tuple[int, int]:
    return noise.key(noise.stream(seed, noise.identity_of_name(name), state), step)


def test_the_function_is_what_the_documentation_states():
    """A transcription in Python integers of docs/numerics.md, Noise."""

    def mix(x: int) -> int:
        x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
        x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
        return x ^ (x >> 16)

    key = _key()
    for index in (0, 1, 65537, (2 << 32) - 1, 2 << 32, (5 << 33) + 12345, (5 << 33) + 12346):
        low, high = (index // 2) & 0xFFFFFFFF, index // 2 >> 32
        inner = mix(low ^ key[0])
        word = mix((inner + (((high * 0x9E3779B9) & 0xFFFFFFFF) ^ key[1])) & 0xFFFFFFFF)
        assert _bits(key, 1, index).item() == (word >> 16 if index % 2 else word & 0xFFFF)


def test_bits_depend_only_on_the_index_not_on_where_a_tile_starts():
    whole = noise.bits(_key(), 0, 1000)
    starts = [0, 1, 250, 251, 252, 999, 1000]
    parts = [noise.bits(_key(), a, b - a) for a, b in pairwise(starts)]
    assert torch.equal(whole, torch.cat(parts))


def test_each_part_of_the_key_selects_other_bits():
    keys = [_key(), _key(seed=1), _key(name="v"), _key(state="exp_avg_sq"), _key(step=2)]
    assert len(set(keys)) == len(keys)
    assert noise.identity_of_position(3) != noise.identity_of_position(4)


@pytest.mark.parametrize("parity", [0, 1])
def test_bits_are_uniform(parity):
    counts = torch.bincount(_bits(_key(), 1 << 21)[parity::2], minlength=1 << 16).double()
    expected = (1 << 20) / (1 << 16)
    chi_square = ((counts - expected) ** 2 / expected).sum().item()
    degrees = (1 << 16) - 1
    assert abs(chi_square - degrees) < 5 * (2 * degrees) ** 0.5


def test_streams_and_neighbours_are_uncorrelated():
    base = _bits(_key()).double()
    others = [
        _bits(_key(step=2)),
        _bits(_key(state="exp_avg_sq")),
        _bits(_key(name="v")),
        _bits(_key(), start=1),
        _bits(_key(), start=2),
        _bits(_key(), start=2 << 32),
    ]
    for other in others:
        assert abs(torch.corrcoef(torch.stack([base, other.double()]))[0, 1].item()) < 5 / 2**10


def test_every_index_bit_flips_half_of_the_bits():
    index = torch.arange(1 << 13)
    base = _bits(_key(), 1 << 13)
    for bit in range(13):
        changed = base ^ base[index ^ (1 << bit)]
        flips = sum(((changed >> k) & 1).double().mean().item() for k in range(16))
        assert abs(flips - 8) < 0.25


def test_neighbours_share_a_word_and_nothing_else():
    """Every pair of bits, one of each half, agrees half of the time."""
    even, odd = _bits(_key()).view(-1, 2).unbind(1)
    for a in range(16):
        for b in range(16):
            agree = (((even >> a) ^ (odd >> b)) & 1).double().mean().item()
            assert abs(agree - 0.5) < 5 * 0.5 / len(even) ** 0.5


def test_torch_generators_are_not_touched():
    before = torch.get_rng_state()
    noise.bits(_key(), 0, 100)
    assert torch.equal(torch.get_rng_state(), before)

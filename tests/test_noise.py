import torch

from halfword import noise


def _words(key: tuple[int, int], count: int = 1 << 20, start: int = 0) -> torch.Tensor:
    return noise.bits(key, start, count).to(torch.int64) & 0xFFFFFFFF


def _key(seed: int = 0, name: str = "w", state: str = "exp_avg", step: int = 1) -> tuple[int, int]:
    return noise.key(seed, noise.identity_of_name(name), state, step)


def test_the_function_is_what_the_documentation_states():
    """A transcription in Python integers of docs/numerics.md, Noise."""

    def mix(x: int) -> int:
        x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
        x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
        return x ^ (x >> 16)

    key = _key()
    for index in (0, 1, 65537, (1 << 32) - 1, 1 << 32, (5 << 32) + 12345):
        low, high = index & 0xFFFFFFFF, index >> 32
        inner = mix(low ^ key[0])
        expected = mix((inner + (((high * 0x9E3779B9) & 0xFFFFFFFF) ^ key[1])) & 0xFFFFFFFF)
        assert _words(key, 1, index).item() == expected


def test_bits_depend_only_on_the_index_not_on_where_a_tile_starts():
    whole = noise.bits(_key(), 0, 1000)
    parts = [noise.bits(_key(), start, 250) for start in (0, 250, 500, 750)]
    assert torch.equal(whole, torch.cat(parts))


def test_each_part_of_the_key_selects_other_bits():
    keys = [_key(), _key(seed=1), _key(name="v"), _key(state="exp_avg_sq"), _key(step=2)]
    assert len(set(keys)) == len(keys)
    assert noise.identity_of_position(3) != noise.identity_of_position(4)


def test_low_16_bits_are_uniform():
    counts = torch.bincount(_words(_key()) & 0xFFFF, minlength=1 << 16).double()
    expected = (1 << 20) / (1 << 16)
    chi_square = ((counts - expected) ** 2 / expected).sum().item()
    degrees = (1 << 16) - 1
    assert abs(chi_square - degrees) < 5 * (2 * degrees) ** 0.5


def test_streams_and_neighbours_are_uncorrelated():
    base = _words(_key()).double()
    others = [
        _words(_key(step=2)),
        _words(_key(state="exp_avg_sq")),
        _words(_key(name="v")),
        _words(_key(), start=1),
        _words(_key(), start=1 << 32),
    ]
    for other in others:
        assert abs(torch.corrcoef(torch.stack([base, other.double()]))[0, 1].item()) < 5 / 2**10


def test_every_input_bit_flips_half_of_the_output_bits():
    index = torch.arange(1 << 12)
    base = _words(_key(), 1 << 12)
    for bit in range(12):
        changed = base ^ base[index ^ (1 << bit)]
        flips = sum(((changed >> k) & 1).double().mean().item() for k in range(32))
        assert abs(flips - 16) < 0.5


def test_torch_generators_are_not_touched():
    before = torch.get_rng_state()
    noise.bits(_key(), 0, 100)
    assert torch.equal(torch.get_rng_state(), before)

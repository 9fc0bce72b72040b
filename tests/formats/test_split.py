import pytest
import torch

from bits import SPECIAL, from_bits, golden_column, golden_rows, same_bits
from halfword.formats import FORMATS

SPLIT, SPLIT24 = FORMATS["split"], FORMATS["split24"]
CHUNK = 1 << 20  # patterns at a time: the temporaries stay in the cache


def test_split_equals_the_golden_vectors():
    rows = golden_rows("split16.csv")
    weight, remainder = SPLIT.encode(from_bits(golden_column(rows, "fp32_bits")), None)
    assert (weight.view(torch.int16).int() & 0xFFFF).tolist() == golden_column(rows, "bf16_bits")
    assert remainder.tolist() == [int(row["remainder_int16"]) for row in rows]


def test_split24_equals_the_golden_vectors():
    rows = golden_rows("split24.csv")
    planes = SPLIT24.encode(from_bits(golden_column(rows, "fp32_bits")), None)
    assert (planes[0].view(torch.int16).int() & 0xFFFF).tolist() == golden_column(rows, "bf16_bits")
    assert planes[1].tolist() == [int(row["remainder_int8"]) for row in rows]
    decoded = from_bits(golden_column(rows, "decoded_fp32_bits"))
    assert same_bits(SPLIT24.decode(planes), decoded)


def test_split_is_the_identity_on_all_patterns():
    """All 2^32 of them: numbers come back bit for bit, NaN as the one NaN, and only NaN as NaN."""
    offsets = torch.arange(CHUNK, dtype=torch.int64)
    for start in range(-(1 << 31), 1 << 31, CHUNK):
        pattern = (offsets + start).to(torch.int32)
        x = pattern.view(torch.float32)
        weight, remainder = SPLIT.encode(x, None)
        decoded = SPLIT.decode((weight, remainder)).view(torch.int32)
        if not torch.equal(decoded, pattern):
            nan = x.isnan()
            assert torch.equal(decoded[~nan], pattern[~nan]), hex(start & 0xFFFFFFFF)
            assert (weight[nan].view(torch.int16) == 0x7FC0).all() and (remainder[nan] == 0).all()


@pytest.mark.parametrize("format", [SPLIT, SPLIT24], ids=lambda f: f.name)
def test_any_remainder_beside_any_weight_decodes_to_a_value_that_shows_the_weight(format):
    """A stale remainder moves a value by half a BF16 step at most, and never to NaN."""
    weight = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16)
    extremes = torch.iinfo(format.planes[1].dtype)
    for remainder in (extremes.min, extremes.min + 1, -1, 0, 1, extremes.max):
        stale = torch.full(weight.shape, remainder, dtype=format.planes[1].dtype)
        shown, _ = format.encode(format.decode((weight, stale)), None)
        assert same_bits(shown, weight)


def test_split24_is_exact_on_24_bits_and_rounds_ties_away():
    planes = SPLIT24.encode(from_bits([0x3F800080, 0x3F80007F, 0x3F80017F, 0xBF800080]), None)
    expected = from_bits([0x3F800100, 0x3F800000, 0x3F800100, 0xBF800100])
    assert same_bits(SPLIT24.decode(planes), expected)


def test_the_weight_is_the_nearest_bf16_with_ties_away_from_zero():
    weight, _ = SPLIT.encode(from_bits([0x3F808000, 0x3F807FFF, 0xBF808000, 0x3F818000]), None)
    assert (weight.view(torch.int16).int() & 0xFFFF).tolist() == [0x3F81, 0x3F80, 0xBF81, 0x3F82]


def test_nan_never_turns_into_a_number():
    """A float add of one to 0x7FFF would make -0.0: a diverged run that looks healthy."""
    for format in (SPLIT, SPLIT24):
        weight, _ = format.encode(SPECIAL, None)
        assert torch.equal(weight.isnan(), SPECIAL.isnan())
        assert torch.equal(format.decode(format.encode(SPECIAL, None)).isnan(), SPECIAL.isnan())

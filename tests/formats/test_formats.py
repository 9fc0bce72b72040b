import pytest
import torch

from bits import SPECIAL, from_bits, same_bits
from halfword import noise
from halfword.formats import FORMATS, MASTER_WEIGHTS, MOMENTS
from halfword.formats.rounding import nearest_even

EVERY = pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
ALONE = pytest.mark.parametrize(  # an element's planes depend on no other
    "format", [f for f in FORMATS.values() if f.block == 1], ids=lambda format: format.name
)
COUNT = 50_048  # of whole blocks


def _values() -> torch.Tensor:
    shape = (COUNT - len(SPECIAL),)
    random = torch.randint(-(1 << 31), 1 << 31, shape, generator=torch.Generator().manual_seed(1))
    return torch.cat([SPECIAL, random.to(torch.int32).view(torch.float32)])


def _noise(format, count):
    return noise.bits((1, 2), 0, count) if format.stochastic else None


@EVERY
def test_planes_have_the_declared_dtypes_and_bytes(format):
    planes = format.encode(_values(), _noise(format, len(_values())))
    assert [plane.dtype for plane in planes] == [plane.dtype for plane in format.planes]
    stored = sum(plane.nbytes for plane in planes) / len(_values())
    assert stored == format.bytes_per_element


@ALONE
def test_what_a_format_holds_survives_another_round(format):
    once = format.decode(format.encode(_values(), _noise(format, len(_values()))))
    again = format.decode(format.encode(once, _noise(format, len(_values()))))
    assert same_bits(once, again)


@ALONE
def test_nan_stays_nan_and_infinity_stays_infinity(format):
    x = _values()
    y = format.decode(format.encode(x, _noise(format, len(x))))
    assert torch.equal(x.isnan(), y.isnan())
    assert same_bits(y[x.isinf()], x[x.isinf()])


@EVERY
def test_zero_has_zero_planes(format):
    """New states are made by zeroing planes."""
    for plane in format.encode(torch.zeros(128), _noise(format, 128)):
        assert (plane.view(torch.uint8) == 0).all()


@ALONE
def test_a_format_holds_the_values_of_those_it_claims_to_hold(format):
    for other in FORMATS.values():
        x = other.decode(other.encode(_values(), _noise(other, len(_values()))))
        x = x[x.abs() <= 60000.0] if format.name.startswith("fp16") else x
        y = format.decode(format.encode(x, _noise(format, len(x))))
        if format.holds(other):
            assert same_bits(x, y), other.name


@EVERY
def test_a_format_in_blocks_holds_only_itself(format):
    if format.block > 1:
        assert [other for other in FORMATS.values() if format.holds(other)] == [format]


@pytest.mark.parametrize("name", ["bf16+fp32", "fp16+fp32"])
def test_a_copy_counts_only_while_it_rounds_to_the_weight(name):
    format = FORMATS[name]
    weight, copy = format.encode(torch.tensor([1.001, 1.001, 0.0, torch.nan, 5.0]), None)
    weight[1], weight[2], weight[4] = 2.0, -0.0, torch.nan
    decoded = format.decode((weight, copy))
    expected = torch.tensor([1.001, 2.0, -0.0, torch.nan, torch.nan])
    assert same_bits(decoded, expected)


def test_fp32_and_split_masters_show_the_same_weight():
    for x in (SPECIAL, _values()):
        split, shadow = FORMATS["split"].encode(x, None), FORMATS["bf16+fp32"].encode(x, None)
        assert same_bits(split[0], shadow[0])
        assert same_bits(FORMATS["split"].decode(split), FORMATS["bf16+fp32"].decode(shadow))


def test_nearest_even_agrees_with_torch():
    x = _values()
    assert same_bits(nearest_even(x), x.bfloat16())


def test_stochastic_rounding_is_unbiased():
    x = torch.full((1_000_000,), 1 + 2.0**-9)
    step = 2.0**-7
    rounded = FORMATS["bf16-sr"].decode(FORMATS["bf16-sr"].encode(x, noise.bits((3, 4), 0, len(x))))
    assert set(rounded.tolist()) == {1.0, 1.0 + step}
    deviation = step * (0.25 * 0.75 / len(x)) ** 0.5
    assert abs(rounded.double().mean().item() - (1 + 2.0**-9)) < 4 * deviation


def test_stochastic_rounding_leaves_bf16_values_and_infinities_alone():
    x = from_bits([0x3F810000, 0xFF800000, 0x7F800000, 0x80000000, 0x00010000]).repeat(1000)
    (rounded,) = FORMATS["bf16-sr"].encode(x, noise.bits((5, 6), 0, len(x)))
    assert same_bits(rounded.float(), x)


def test_settings_name_formats_that_are_listed():
    for formats in (*MASTER_WEIGHTS.values(), MOMENTS):
        assert all(format is FORMATS[format.name] for format in formats.values())

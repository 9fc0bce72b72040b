"""Moments in 8 bits: the code itself, and what no loss would show."""

import copy
import logging
import math
import warnings

import pytest
import torch
from torch import nn

from bits import same_bits
from halfword import AdamW, noise
from halfword.backends import BACKENDS
from halfword.formats import FORMATS, moment_format
from halfword.formats.block8 import BLOCK
from halfword.stored import Stored, decode_all, make_slot, tiles, transcode
from helpers import OPTIMIZERS, require, same, through_disk

SIGNED, UNSIGNED = FORMATS["int8"], FORMATS["uint8"]
BOTH = pytest.mark.parametrize("format", [SIGNED, UNSIGNED], ids=["int8", "uint8"])
TOP = {"int8": 127, "uint8": 255}


def encode(format, x, step=1):
    return format.encode(x, noise.bits(noise.key(7, step), 0, x.numel()))


def round_trip(format, x):
    return format.decode(encode(format, x))


def values(format, count=64 * BLOCK, seed=0):
    """Numbers over many orders of magnitude, and zeros, in each block."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, generator=generator) * torch.exp2(
        torch.randint(-12, 3, (count,), generator=generator).float()
    )
    x[::7] = 0.0
    return x if format is SIGNED else x.abs()


# The code.


def test_levels_are_multiples_or_octaves_of_32_steps():
    scale = torch.full((4,), 0.5)
    codes = torch.arange(-128, 128)
    assert SIGNED.decode((codes.to(torch.int8), scale)).tolist() == [c / 2 for c in codes.tolist()]
    expected = [2 ** (c // 32 + 1) * (1 + c % 32 / 32) - 2 for c in range(256)]
    found = UNSIGNED.decode((torch.arange(256).to(torch.uint8), scale))
    assert found.tolist() == [level / 2 for level in expected]
    assert expected[:3] == [0, 1 / 16, 2 / 16] and expected[-1] == 502


@BOTH
def test_a_value_becomes_one_of_its_two_neighbours_without_bias(format):
    x = values(format)
    every = torch.arange(256).to(format.planes[0].dtype)
    levels = format.decode((every, torch.ones(4))).double().unique()  # in units of the scale
    around = torch.cat([torch.tensor([-math.inf]), levels, torch.tensor([math.inf])])
    _, scales = encode(format, x)
    ratio = (x.view(-1, BLOCK).double() / scales.view(-1, 1)).nan_to_num().view(-1)
    total, rounds = torch.zeros_like(ratio), 400
    for step in range(rounds):
        codes, _ = encode(format, x, step)
        level = format.decode((codes, torch.ones_like(scales))).double()
        place = torch.searchsorted(levels, level)
        between = (around[place] < ratio + 1e-4) & (ratio - 1e-4 < around[place + 2])
        assert (between | ((codes == 1) & (format is UNSIGNED))).all()
        total += level
    place = torch.searchsorted(levels, ratio, right=True).clamp(1, len(levels) - 1)
    error = (total / rounds - ratio) / (levels[place] - levels[place - 1])
    error = error[(ratio == 0) | (ratio.abs() >= levels[levels > 0][0])]  # where none is kept up
    assert error.abs().max() < 5 * 0.5 / math.sqrt(rounds)
    assert abs(error.mean()) < 5 * 0.5 / math.sqrt(rounds * error.numel())


@BOTH
def test_the_largest_of_a_block_comes_back_and_so_does_every_level(format):
    x = values(format)
    largest = x.view(-1, BLOCK).abs().amax(1)
    assert torch.allclose(round_trip(format, x).view(-1, BLOCK).abs().amax(1), largest, rtol=2e-7)
    codes = torch.arange(256).to(format.planes[0].dtype).view(4, BLOCK)
    codes[:, 0] = TOP[format.name]
    codes[codes == -128] = 0
    planes = codes.view(-1), torch.tensor([1.0, 2.0, 2.0**-100, 2.0**90])
    for step in range(20):
        found = encode(format, format.decode(planes), step)
        assert all(torch.equal(a, b) for a, b in zip(planes, found, strict=True))


@BOTH
def test_zero_is_exact_and_a_block_of_zeros_is_all_zero_bits(format):
    x = values(format)
    x[:BLOCK] = 0.0
    x[BLOCK : 2 * BLOCK] = -0.0
    codes, scales = encode(format, x)
    assert (codes[x == 0] == 0).all() and (scales[:2] == 0).all()
    assert (round_trip(format, x)[x == 0] == 0).all()


def test_what_is_positive_stays_so_in_a_second_moment():
    x = torch.full((BLOCK,), 2.0**-126)
    for largest in (2.0**-126, 1e-30, 1.0, 3e38):
        x[-1] = largest
        for step in range(20):
            codes, scales = encode(UNSIGNED, x, step)
            decoded = UNSIGNED.decode((codes, scales))
            assert (codes > 0).all() and (decoded > 0).all()
            assert (decoded >= 2.0**-126).all(), "subnormal numbers slow every CPU"


@BOTH
def test_the_smallest_blocks_hold_no_subnormal_numbers(format):
    for exponent in range(-126, -100):
        x = values(format).abs() * 2.0**exponent
        x = torch.where(x < 2.0**-126, 0.0, x)
        decoded = round_trip(format, x)
        assert ((decoded == 0) | (decoded >= 2.0**-126)).all()


@BOTH
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_take_their_block_and_no_other(format, bad):
    x = values(format, 3 * BLOCK)
    expected = round_trip(format, x)
    x[BLOCK + 5] = bad
    codes, scales = encode(format, x)
    found = format.decode((codes, scales)).view(3, BLOCK)
    assert found[1].isnan().all() and (codes.view(3, BLOCK)[1] == 0).all()
    assert same_bits(found[::2], expected.view(3, BLOCK)[::2])


def test_a_negative_second_moment_counts_as_nan():
    x = values(UNSIGNED, 2 * BLOCK)
    x[3] = -1e-9
    assert UNSIGNED.decode(encode(UNSIGNED, x)).isnan().view(2, BLOCK).all(1).tolist() == [
        True,
        False,
    ]


# What is quantized.


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((64, 64), "int8"),
        ((2, 33, 64), "int8"),
        ((1, 4096), "int8"),
        ((4096,), "fp32"),
        ((), "fp32"),
        ((63, 64), "fp32"),
        ((64, 65), "bf16-sr"),
        ((512, 3, 3, 3), "bf16-sr"),
    ],
)
def test_the_shape_decides(shape, expected):
    assert moment_format("int8", True, torch.Size(shape)).name == expected
    unsigned = expected.replace("int8", "uint8")
    assert moment_format("int8", False, torch.Size(shape)).name == unsigned


def test_what_is_not_quantized_is_reported_once(caplog):
    shapes = {"norm": (64,), "conv": (64, 32, 3), "w": (64, 64), "a": (2,), "b": (), "c": (3, 4)}
    named = [(name, nn.Parameter(torch.zeros(shape))) for name, shape in shapes.items()]
    with caplog.at_level(logging.INFO):
        opt = AdamW(named, moments="int8")
        for _, p in named:
            p.grad = torch.ones_like(p)
        opt.step()
    assert caplog.messages == [
        "moments='int8': 4 parameters of one dimension or under 4096 elements take fp32: "
        "parameter 'norm', parameter 'a', parameter 'b', ...",
        "moments='int8': 1 parameters whose last dimension is no multiple of 64 take bf16-sr: "
        "parameter 'conv'",
    ]
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]


def test_either_moment_may_be_in_8_bits():
    p = nn.Parameter(torch.zeros(2, 40, 128).bfloat16())
    state = AdamW([p], moments=("fp32", "int8")).state[p]
    assert {key: (t.dtype, t.shape) for key, t in state.items() if key.startswith("exp")} == {
        "exp_avg": (torch.float32, p.shape),
        "exp_avg_sq_code": (torch.uint8, p.shape),
        "exp_avg_sq_scale": (torch.float32, (2, 40, 2)),
    }
    state = OPTIMIZERS["sgd_momentum"]([p], moments="int8").state[p]
    assert state["momentum_buffer_code"].dtype == torch.int8


def test_a_plane_in_blocks_goes_with_its_parameter_whatever_the_strides():
    parameter = torch.zeros(128, 600).t()
    (codes, scales) = make_slot(SIGNED, "exp_avg", parameter).values()
    assert codes.stride() == parameter.stride() and scales.shape == (600, 2)
    rows = torch.arange(600.0).view(-1, 1) + torch.tensor([0.0, 0.5]).repeat_interleave(BLOCK)
    slot = Stored(SIGNED, (codes, scales))
    transcode(Stored(FORMATS["fp32"], (rows,)), slot, step=1)
    assert torch.allclose(scales * 127, rows[:, ::BLOCK])
    assert torch.allclose(decode_all(slot), rows)


def test_tiles_cut_no_block(monkeypatch):
    monkeypatch.setattr("halfword.stored.TILE", 2 * BLOCK)
    for shape in [(3, 5 * BLOCK), (2, 3, BLOCK)]:
        wide = torch.arange(math.prod(shape)).view(shape)
        narrow = wide[..., ::BLOCK].contiguous()
        for tensors in (
            [wide, narrow],
            [wide.transpose(0, 1).contiguous().transpose(0, 1), narrow],
        ):
            for start, (a, b) in tiles(tensors):
                assert a.reshape(-1)[0] == start
                assert torch.equal(a.reshape(-1)[::BLOCK], b.reshape(-1))


# Over many steps.


def trained(gradients, backend="auto", **settings):
    """An optimizer after these gradients, and the weight after each, from FP32 zeros."""
    p = nn.Parameter(torch.zeros(64, BLOCK))
    opt = AdamW([p], moments="int8", weight_decay=0.0, backend=backend, **settings)
    weights = []
    for gradient in gradients:
        p.grad = gradient
        opt.step()
        weights.append(p.detach().clone())
    return opt, weights


def moments(opt):
    """Both moments in FP32."""
    (p,) = opt.param_groups[0]["params"]
    state = opt.state[p]
    return tuple(
        decode_all(Stored(format, (state[f"{slot}_code"], state[f"{slot}_scale"])))
        for slot, format in (("exp_avg", SIGNED), ("exp_avg_sq", UNSIGNED))
    )


def random(scale, steps, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        yield scale * torch.randn(64, BLOCK, generator=generator)


@pytest.mark.parametrize("beta2", [0.95, 0.999])
@pytest.mark.parametrize("when", [0, 30])
def test_one_outlier_moves_no_weight_of_its_block_far(when, beta2):
    gradients = list(random(1e-4, 300))
    gradients[when][3, 5] = 1e4
    _, weights = trained(gradients, lr=1e-3, betas=(0.9, beta2))
    steps = torch.stack(weights).diff(dim=0, prepend=torch.zeros(1, 64, BLOCK))
    assert steps.abs().max() <= 10 * 1e-3


def test_a_coordinate_without_gradient_never_moves():
    gradients = list(random(1.0, 300))
    for gradient in gradients:
        gradient[:, 0] = 0.0
    _, weights = trained(gradients)
    assert (weights[-1][:, 0] == 0).all()


def test_a_coordinate_whose_gradient_ends_comes_to_rest_where_it_should():
    gradients = list(random(1.0, 600))
    for gradient in gradients[100:]:
        gradient[:, 0] = 0.0
    _, weights = trained(gradients, lr=1e-3)
    p = nn.Parameter(torch.zeros(64, BLOCK))
    exact = AdamW([p], lr=1e-3, weight_decay=0.0)
    for gradient in gradients:
        p.grad = gradient
        exact.step()
    assert torch.equal(weights[400][:, 0], weights[-1][:, 0])
    assert (weights[-1][:, 0] - p.detach()[:, 0]).abs().max() < 2e-3  # two steps


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_second_moment_follows_gradients_that_fall_tenfold(backend):
    require(backend)
    steps = 300 if backend == "reference" else 1500
    gradients = [*random(1.0, steps), *random(0.1, steps, seed=1)]
    opt, _ = trained(gradients, backend, betas=(0.9, 0.999))
    exact = torch.zeros(64, BLOCK, dtype=torch.float64)
    for gradient in gradients:
        exact = 0.999 * exact + 0.001 * gradient.double() ** 2
    ratio = moments(opt)[1].double() / exact
    assert abs(ratio.mean() - 1) < 0.01 and ratio.std() < 0.15


def test_moments_do_not_drift_over_many_steps():
    gradients = [gradient + 0.1 for gradient in random(1.0, 1000)]
    opt, _ = trained(gradients)
    m = torch.zeros(64, BLOCK, dtype=torch.float64)
    for gradient in gradients:
        m += (1 - 0.9) * (gradient.double() - m)
    error = moments(opt)[0].double() - m
    assert abs(error.mean()) < 5e-3 * m.std() and error.std() < 0.05 * m.std()


def test_steps_without_any_gradient_end_in_zero_planes():
    zeros = [torch.zeros(64, BLOCK)] * 3
    opt, weights = trained(zeros)
    assert all((plane == 0).all() for key, plane in state_of(opt).items() if key != "step")
    assert (weights[-1] == 0).all()


def state_of(opt):
    (state,) = opt.state.values()
    return state


def test_nan_in_one_block_reaches_no_other():
    gradients = list(random(1.0, 5))
    gradients[2][7, 9] = math.nan
    opt, weights = trained(gradients)
    assert weights[-1].isnan().all(1).tolist() == [row == 7 for row in range(64)]
    assert all(m.isnan().any(1).sum() == 1 for m in moments(opt))


# Loading.


def loaded(opt, convert=False, **settings):
    (p,) = opt.param_groups[0]["params"]
    other = AdamW([nn.Parameter(p.detach().clone())], weight_decay=0.0, **settings)
    other.load_state_dict(through_disk(opt.state_dict()), convert=convert)
    return other


def test_8_bits_convert_to_fp32_exactly_and_to_nothing_else():
    opt, _ = trained(random(1.0, 3))
    wide = loaded(opt, moments="fp32")
    for moment, slot in zip(moments(opt), ("exp_avg", "exp_avg_sq"), strict=True):
        assert same(state_of(wide)[slot], moment)
    with pytest.raises(ValueError, match="parameter 0: exp_avg: int8 to bf16-sr would round"):
        loaded(opt, moments="bf16-sr")
    with pytest.raises(ValueError, match="parameter 0: exp_avg_sq: fp32 to uint8 would round"):
        loaded(wide, moments=("fp32", "int8"))
    with pytest.warns(UserWarning, match="exp_avg: fp32 to int8 .1 parameters., exp_avg_sq"):
        back = loaded(wide, convert=True, moments="int8")
    for a, b in zip(moments(opt), moments(back), strict=True):
        assert torch.allclose(a, b, rtol=1 / 32, atol=a.abs().max().item() / 64)


def test_equal_formats_are_copied_bit_for_bit_and_damaged_ones_refused():
    opt, _ = trained(random(1.0, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other = loaded(opt, moments="int8", seed=5)
    assert all(same(state_of(opt)[key], plane) for key, plane in state_of(other).items())
    saved = copy.deepcopy(opt.state_dict())
    saved["state"][0]["exp_avg_scale"] = torch.zeros(64, 2)
    message = r"parameter 0: saved exp_avg_scale has shape \(64, 2\), must be \(64, 1\)"
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(saved)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_scale_of_another_dtype_is_refused_before_anything_is_written(dtype):
    p = torch.nn.Parameter(torch.randn(64, 64).bfloat16())
    opt = AdamW([p], moments="int8")
    saved = opt.state_dict()
    saved["state"][0]["exp_avg_sq_scale"] = saved["state"][0]["exp_avg_sq_scale"].to(dtype)
    for moments in ("int8", "fp32"):
        with pytest.raises(ValueError, match="saved exp_avg_sq_scale is"):
            AdamW([p], moments=moments).load_state_dict(saved)

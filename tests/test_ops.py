import math

import torch

from halfword import ops


def test_sqrt_is_correctly_rounded_on_large_tensors():
    x = torch.rand(1 << 20, generator=torch.Generator().manual_seed(0)) * 1e6
    exact = torch.tensor([math.sqrt(value) for value in x[:4096].tolist()], dtype=torch.float64)
    assert torch.equal(ops.sqrt(x)[:4096], exact.float())


def test_sign_keeps_nan_and_both_zeros():
    signs = ops.sign(torch.tensor([-2.0, -0.0, 0.0, 3.0, torch.inf, torch.nan]))
    assert signs[:5].tolist() == [-1.0, 0.0, 0.0, 1.0, 1.0]
    assert signs[5].isnan()


def test_where_takes_a_bool_or_a_tensor():
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    assert ops.where(True, a, b) is a
    assert ops.where(a > 1.5, a, b).tolist() == [3.0, 2.0]


def test_sqrt_of_a_float_is_in_float64():
    assert ops.sqrt(2.0) == math.sqrt(2.0)


def test_power_multiplies_squares_lowest_bit_first():
    base = 0.999
    square = base * base
    assert ops.power(base, 0) == 1.0
    assert ops.power(base, 1) == base
    assert ops.power(base, 7) == (base * square) * (square * square)
    for exponent in (10, 1000, 100_000):
        assert math.isclose(ops.power(base, exponent), base**exponent, rel_tol=exponent * 2e-16)

import math

import pytest
import torch

from halfword import AdamW
from halfword.clip import clip_coefficient, is_finite, some_not_finite, total_norm


def test_norm_is_accumulated_in_float64_over_all_tensors():
    gradients = [torch.randn(70_000).bfloat16(), torch.randn(3, 5).t(), torch.tensor(2.0)]
    exact = math.sqrt(sum(g.double().square().sum().item() for g in gradients))
    norm = total_norm(gradients)
    assert norm.dtype == torch.float64 and norm.shape == ()
    assert math.isclose(norm.item(), exact, rel_tol=1e-12)


def test_norm_of_nothing_is_zero():
    assert total_norm([]).item() == 0.0
    assert total_norm([torch.zeros(0)]).item() == 0.0


def test_a_norm_beyond_fp32_is_still_a_number():
    assert math.isclose(total_norm([torch.full((4,), 3e38)]).item(), 6e38, rel_tol=1e-6)


def test_coefficient_is_at_most_one_and_keeps_nan():
    assert clip_coefficient(torch.tensor(0.5), 1.0) == 1.0
    assert clip_coefficient(torch.tensor(torch.inf), 1.0) == 0.0
    assert clip_coefficient(torch.tensor(torch.inf), math.inf) == 1.0
    assert math.isnan(clip_coefficient(torch.tensor(torch.nan), 1.0))


@pytest.mark.parametrize("max_norm", [-1.0, math.nan])
def test_a_senseless_max_norm_is_refused(max_norm):
    with pytest.raises(ValueError, match=r"max_norm=(-1.0|nan): must be at least 0"):
        clip_coefficient(torch.tensor(1.0), max_norm)


def test_finiteness():
    assert is_finite(torch.zeros(0)) and is_finite(torch.ones(70_000))
    assert not is_finite(torch.tensor([1.0, torch.inf])) and not is_finite(torch.tensor(torch.nan))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan, 1.0])
def test_one_value_that_is_not_finite_is_found_among_all_gradients(dtype, value):
    gradients = [torch.full((3, 5), -2.0, dtype=dtype), torch.zeros(0), torch.zeros(7)]
    gradients[0][1, 2] = value
    assert some_not_finite(gradients).item() == (value != 1.0)
    assert not some_not_finite([]).item()


def test_clipping_scales_one_step_and_rewrites_no_gradient():
    a, b = (torch.nn.Parameter(torch.zeros(8)) for _ in range(2))
    clipped, scaled = AdamW([a], weight_decay=0.0), AdamW([b], weight_decay=0.0)
    a.grad = torch.full((8,), 3.0)
    norm = clipped.clip_grad_norm(1.0)
    assert math.isclose(norm.item(), 3.0 * 8**0.5) and torch.equal(a.grad, torch.full((8,), 3.0))
    coefficient = torch.tensor(clip_coefficient(norm, 1.0))
    b.grad = torch.full((8,), 3.0) * coefficient
    clipped.step()
    scaled.step()
    assert torch.equal(clipped.state[a]["exp_avg"], scaled.state[b]["exp_avg"])
    a.grad, b.grad = torch.ones(8), torch.ones(8)
    clipped.step()
    scaled.step()
    assert torch.equal(a, b)


def test_zero_grad_forgets_a_pending_coefficient():
    p = torch.nn.Parameter(torch.zeros(2))
    opt = AdamW([p])
    p.grad = torch.full((2,), 100.0)
    opt.clip_grad_norm(1.0)
    opt.zero_grad()
    p.grad = torch.ones(2)
    opt.step()
    assert torch.allclose(opt.state[p]["exp_avg"], torch.full((2,), 0.1))

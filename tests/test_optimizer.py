import pytest
import torch

from bits import same_bits
from halfword import SGD, AdamW, Lion
from halfword.formats import MOMENTS

SHAPES = [(33, 7), (5,), (), (0, 3), (257, 300)]


def _parameters(dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    made = [torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in SHAPES]
    strided = torch.randn(9, 4, generator=generator).t().to(dtype)
    return [*made, torch.nn.Parameter(strided)]


def _train(steps=30, **settings):
    parameters = _parameters()
    opt = AdamW(parameters, lr=1e-2, **settings)
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        for p in parameters:
            p.grad = torch.randn(p.shape, generator=generator).bfloat16()
        if step % 3 == 0:
            opt.clip_grad_norm(1.0)
        opt.step()
        opt.zero_grad()
    return parameters, opt


@pytest.mark.parametrize("moments", MOMENTS)
def test_split_and_fp32_masters_are_equal_bit_for_bit(moments):
    a, split = _train(master_weights="split", moments=moments)
    b, fp32 = _train(master_weights="fp32", moments=moments)
    for x, y in zip(a, b, strict=True):
        assert same_bits(x.data, y.data)
        assert same_bits(split.master_weight(x), fp32.master_weight(y))


def test_states_exist_from_construction_with_the_documented_keys():
    p = torch.nn.Parameter(torch.ones(3).bfloat16())
    state = AdamW([p], moments=("bf16", "fp32")).state[p]
    dtypes = {key: tensor.dtype for key, tensor in state.items()}
    assert dtypes == {
        "step": torch.float32,
        "remainder": torch.int16,
        "exp_avg_bf16": torch.bfloat16,
        "exp_avg_sq": torch.float32,
    }


def test_one_group_may_mix_dtypes():
    parameters = [
        torch.nn.Parameter(torch.ones(4, dtype=dtype))
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    ]
    opt = AdamW(parameters, lr=0.1)
    for p in parameters:
        p.grad = torch.ones_like(p)
    opt.step()
    masters = [opt.master_weight(p) for p in parameters]
    assert torch.equal(masters[0], masters[1]) and torch.equal(masters[0], masters[2])
    assert [p.dtype for p in parameters] == [torch.float32, torch.bfloat16, torch.float16]


def test_groups_may_differ_in_formats():
    a, b = (torch.nn.Parameter(torch.ones(4).bfloat16()) for _ in range(2))
    opt = AdamW([{"params": [a], "moments": "bf16"}, {"params": [b], "master_weights": "bf16"}])
    assert set(opt.state[a]) == {"step", "remainder", "exp_avg_bf16", "exp_avg_sq_bf16"}
    assert set(opt.state[b]) == {"step", "exp_avg", "exp_avg_sq"}


def test_a_rule_of_one_moment_takes_one_setting():
    p = torch.nn.Parameter(torch.ones(4))
    with pytest.raises(ValueError, match=r"moments=\('fp32', 'bf16'\): lion keeps 1 \(exp_avg\)"):
        Lion([p], moments=("fp32", "bf16"))
    assert set(SGD([p]).state[p]) == {"step"}
    assert set(SGD([p], momentum=0.9).state[p]) == {"step", "momentum_buffer"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1.0}, "lr=-1.0: must be at least 0 and finite"),
        ({"lr": float("nan")}, "lr=nan: must be at least 0 and finite"),
        ({"lr": torch.ones(2)}, r"lr has shape \(2,\): a tensor must hold one element"),
        ({"betas": (0.9, 1.0)}, r"betas\[1\]=1.0: must be at least 0 and below 1"),
        ({"eps": -1e-8}, "eps=-1e-08: must be at least 0 and finite"),
        ({"amsgrad": True}, "amsgrad=True: not supported"),
        ({"differentiable": True}, "differentiable=True: not supported"),
        ({"capturable": True, "backend": "native"}, "capturable=True, backend='native': use"),
        ({"foreach": True, "fused": True}, "at most one of the two may be True"),
        ({"master_weights": "int8"}, "master_weights='int8': use one of 'auto', 'split'"),
        ({"moments": "fp8"}, "moments='fp8': use one of 'fp32', 'bf16', 'bf16-sr'"),
        ({"on_nonfinite": "ignore"}, "on_nonfinite='ignore': use one of 'propagate', 'skip'"),
        ({"backend": "cuda"}, "backend='cuda': use one of 'auto', 'reference'"),
    ],
)
def test_a_setting_that_cannot_be_honoured_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        AdamW([torch.nn.Parameter(torch.ones(2).bfloat16())], **settings)


def test_fp16_refuses_formats_made_for_bf16():
    p = torch.nn.Parameter(torch.ones(2).half())
    message = "master_weights='split': parameter 'w' is float16, which takes 'auto' or 'fp32'"
    with pytest.raises(ValueError, match=message):
        AdamW([("w", p)], master_weights="split")


def test_a_refused_group_leaves_nothing_behind():
    p, q = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    opt = AdamW([p])
    with pytest.raises(ValueError, match="moments='fp8'"):
        opt.add_param_group({"params": [q], "moments": "fp8"})
    assert len(opt.param_groups) == 1 and q not in opt.state


def test_a_parameter_cast_before_its_first_step_gets_the_state_of_its_dtype():
    p = torch.nn.Parameter(torch.randn(4).bfloat16())
    opt = AdamW([p])
    p.data = p.data.float()
    p.grad = torch.ones(4)
    opt.step()
    assert set(opt.state[p]) == {"step", "exp_avg", "exp_avg_sq"}
    p.data = p.data.bfloat16()
    p.grad = None
    p.grad = torch.ones(4).bfloat16()
    with pytest.raises(ValueError, match="parameter 0: its dtype or formats changed after 1 steps"):
        opt.step()

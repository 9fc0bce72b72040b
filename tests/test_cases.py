"""Faults that users of neighbouring projects reported, each as a test of the right behaviour here.

A docstring names the public threads. The number is the fault's place in the project's list; those
of trainers, of sharding and of 8-bit formats are tested elsewhere.
"""

import contextlib
import copy
import gc
import logging
import math
import weakref

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from halfword import SGD, Adam, AdamW, Lion
from halfword.formats import MASTER_WEIGHTS, MOMENTS
from halfword.rules import RULES
from helpers import (
    OPTIMIZERS,
    WEIGHTS,
    assert_same_snapshot,
    assert_same_training,
    constant,
    feed,
    moment_settings,
    parameters,
    pattern,
    same,
    snapshot,
    threads,
    through_disk,
    train,
)

BF16_WEIGHTS = [setting for dtype, setting in WEIGHTS if dtype == torch.bfloat16]
EXACT = ["auto", "fp32"]  # master weights that hold FP32 to the last bit
FLAT = pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """On a busy machine, threads that share an operation mostly wait for each other."""
    with threads(1):
        yield


def from_patterns(patterns):
    """FP32 values with these bits."""
    unsigned = torch.tensor(patterns, dtype=torch.int64)
    return (unsigned - ((unsigned >> 31) << 32)).to(torch.int32).view(torch.float32)


def rounds_to(master, weight):
    """Whether FP32 masters round (ties away from zero) to BF16 weights, NaN to NaN."""
    upper = (pattern(master).long() + 0x8000) >> 16
    equal = (upper & 0xFFFF) == (pattern(weight).long() & 0xFFFF)
    return bool((equal | (master.isnan() & weight.isnan())).all())


class Net(nn.Module):
    """A small BF16 model with a tied weight and, in ``scale``, one FP32 parameter."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.embed = nn.Embedding(6, 4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(4))
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator))
        for module in (self.embed, self.body):
            module.bfloat16()
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        hidden = self.body(self.embed(tokens)) * self.scale.bfloat16()
        return self.head(hidden).float()


# 1


@pytest.mark.parametrize("setting", BF16_WEIGHTS)
def test_case_01_nan_and_infinity_survive_every_weight_format(setting):
    """gorse-io/gorse#1240, dotnet/runtime#130583, milankl/StochasticRounding.jl#48."""
    patterns = [0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000, 0x7F800001, 0xFF800001, 0x7F800000, 0xFF800000]
    values = from_patterns(patterns).repeat(10_000)
    p = constant(0.0, len(values))
    opt = Lion([p], lr=0.0, master_weights=setting)
    opt.set_master_weight(p, values)
    for tensor in (p.detach().float(), opt.master_weight(p)):
        assert torch.equal(tensor.isnan(), values.isnan())
        assert torch.equal(tensor[values.isinf()], values[values.isinf()])


@pytest.mark.parametrize("setting", BF16_WEIGHTS)
def test_case_01_the_largest_finite_number_stays_finite_where_the_master_can_hold_it(setting):
    """gorse-io/gorse#1240: nearest BF16 is Inf, the master is not."""
    p = constant(0.0, 2)
    opt = Lion([p], lr=0.0, master_weights=setting)
    values = from_patterns([0x7F7FFFFF, 0xFF7F8000])
    opt.set_master_weight(p, values)
    if setting in EXACT:
        assert p.isinf().all() and same(opt.master_weight(p), values)
        p.grad = torch.zeros_like(p)
        opt.step()
        assert same(opt.master_weight(p), values)


@pytest.mark.parametrize(("dtype", "setting"), WEIGHTS)
@pytest.mark.parametrize("rule", RULES)
def test_case_01_a_nan_gradient_makes_every_weight_nan(rule, dtype, setting):
    """Transformer Engine's split adds 1 to the upper half of a NaN and shows the model -0.0."""
    p = constant(1.5, 100, dtype=dtype)
    opt = OPTIMIZERS[rule]([p], master_weights=setting)
    train(opt, [1])
    p.grad = torch.full_like(p, math.nan)
    opt.step()
    assert p.isnan().all() and opt.master_weight(p).isnan().all()


# 2


@pytest.mark.parametrize("rule", RULES)
def test_case_02_states_keep_dtype_and_bits_through_a_load(rule):
    """pytorch#43706, fairscale#50, NVIDIA/Megatron-LM#1359, vllm-project/speculators#899."""
    for moments in moment_settings(rule):
        settings = {"moments": moments or "fp32"}
        a, b = (
            OPTIMIZERS[rule](parameters(), **settings),
            OPTIMIZERS[rule](parameters(), **settings),
        )
        train(a, range(3))
        dtypes = [{k: t.dtype for k, t in state.items()} for state in a.state.values()]
        with torch.no_grad():
            for p, q in zip(a.param_groups[0]["params"], b.param_groups[0]["params"], strict=True):
                q.copy_(p)
        b.load_state_dict(through_disk(a.state_dict()))
        assert [{k: t.dtype for k, t in state.items()} for state in b.state.values()] == dtypes
        assert_same_training(a, b)


# torch itself cannot load a full state dict that it has flattened.
@pytest.mark.parametrize(
    "options",
    [
        StateDictOptions(),
        StateDictOptions(flatten_optimizer_state_dict=True),
        StateDictOptions(full_state_dict=True),
    ],
    ids=["nested", "flat", "full"],
)
@pytest.mark.parametrize("rule", RULES)
def test_case_02_states_keep_dtype_and_bits_through_distributed_checkpoint(rule, options, tmp_path):
    """pytorch#43706 by torch.distributed.checkpoint, in memory and through files."""
    for moments in moment_settings(rule):
        settings = {"moments": moments or "fp32"}
        model, other, third = Net(), Net(), Net()
        a, b, c = (OPTIMIZERS[rule](net.parameters(), **settings) for net in (model, other, third))
        train(a, range(3))
        other.load_state_dict(model.state_dict())
        third.load_state_dict(model.state_dict())
        saved = get_optimizer_state_dict(model, a, options=options)
        set_optimizer_state_dict(other, b, copy.deepcopy(saved), options=options)
        assert_same_training(a, b)

        folder = tmp_path / "-".join(("moments", *moments))
        dcp.save(saved, checkpoint_id=folder, no_dist=True)
        read = get_optimizer_state_dict(third, c, options=options)
        dcp.load(read, checkpoint_id=folder, no_dist=True)
        set_optimizer_state_dict(third, c, read, options=options)
        assert_same_training(a, c)
        train(a, [3])
        train(c, [3])
        assert_same_training(a, c)


# 3


@pytest.mark.parametrize("setting", BF16_WEIGHTS)
@pytest.mark.parametrize("rule", RULES)
def test_case_03_a_weight_written_from_outside_is_not_undone(rule, setting):
    """Megatron-LM#5071 and #174, SkyRL#2149, DeepSpeed#762 and #4141: stale masters came back."""
    p = constant(1.0, 50)
    opt = OPTIMIZERS[rule]([p], master_weights=setting)
    train(opt, range(3))
    opt.param_groups[0]["lr"] = 0.0
    for value in (5.0, 0.0, -0.0, -3e-39):
        p.data.fill_(value)
        written = p.detach().clone()
        p.grad = torch.zeros_like(p)
        opt.step()
        assert torch.equal(p, written)
        # Half a BF16 step of `value`: what a stale remainder may add, a stale copy may not.
        slack = 0.0 if setting == "fp32" else max(abs(value) * 2.0**-8, 2.0**-134)
        assert ((opt.master_weight(p) - written.float()).abs() <= slack).all()


@pytest.mark.parametrize("setting", BF16_WEIGHTS)
def test_case_03_zeroed_weights_train_on_as_if_started_at_zero(setting):
    """A stale negative remainder beside 0.0 would read as NaN: pruning masks, zeroed rows."""
    p = constant(1.0, 64)
    opt = AdamW([p], lr=1e-2, master_weights=setting)
    train(opt, range(3))
    ref = nn.Parameter(torch.zeros(64))
    restarted = AdamW([ref], lr=1e-2)
    restarted.load_state_dict({**opt.state_dict(), "state": {0: _without_master(opt.state[p])}})
    p.data.zero_()
    feed([p], 3)
    ref.grad = p.grad.float()
    opt.step()
    restarted.step()
    master = opt.master_weight(p)
    if setting in EXACT:
        assert torch.allclose(master, ref.detach(), rtol=1e-6, atol=2.0**-134)
    assert p.isfinite().all()
    assert torch.allclose(master, ref.detach(), rtol=2.0**-7)


def _without_master(state):
    return {key: state[key].clone() for key in ("step", "exp_avg", "exp_avg_sq")}


@pytest.mark.parametrize(("setting", "plane"), [("split", "remainder"), ("split24", "remainder8")])
def test_case_03_any_weight_beside_any_remainder_decodes_to_what_rounds_to_it(setting, plane):
    """The wrong file, a mask, a swap: whatever the pair, the weight wins."""
    every = torch.arange(1 << 16).to(torch.int16).view(torch.bfloat16)
    p = nn.Parameter(every)
    opt = AdamW([p], master_weights=setting)
    info = torch.iinfo(opt.state[p][plane].dtype)
    for remainder in (info.min, info.min + 1, -1, 0, 1, info.max):
        opt.state[p][plane].fill_(remainder)
        assert rounds_to(opt.master_weight(p), every)


@pytest.mark.parametrize("setting", BF16_WEIGHTS)
def test_case_03_a_separate_copy_counts_only_while_it_rounds_to_the_weight(setting):
    """Megatron-LM#5071: a stale FP32 copy overrode loaded weights."""
    p = constant(1.0, 8)
    opt = AdamW([p], master_weights=setting, lr=1e-4)
    train(opt, range(5))
    moved = opt.master_weight(p)
    p.data[:4] = 7.0
    assert (opt.master_weight(p)[:4] - 7.0).abs().max() <= 2.0**-6
    assert same(opt.master_weight(p)[4:], moved[4:])
    opt.refresh_master_weights()
    assert same(opt.master_weight(p), p.detach().float())


@pytest.mark.parametrize("swap", [False, True], ids=["copied", "swapped"])
@pytest.mark.parametrize("setting", BF16_WEIGHTS)
def test_case_03_loading_a_model_after_building_the_optimizer_keeps_the_loaded_weights(
    setting, swap
):
    """Megatron-LM#5071: fine-tuning started from random weights although they had been loaded."""
    model = nn.Linear(8, 8).bfloat16()
    opt = AdamW(model.parameters(), lr=1e-3, master_weights=setting)
    train(opt, range(3))
    pretrained = {k: torch.randn(v.shape).to(v.dtype) for k, v in model.state_dict().items()}
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        model.load_state_dict(pretrained)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    opt.param_groups[0]["lr"] = 0.0
    train(opt, [3])
    for name, p in model.named_parameters():
        assert same(p.detach(), pretrained[name])
        assert (opt.master_weight(p) - pretrained[name]).abs().max() <= 2.0**-6


def test_case_03_weights_assigned_anew_belong_to_no_optimizer_as_in_torch():
    """`load_state_dict(assign=True)` makes new parameters: say so when asked, never guess."""
    model = nn.Linear(3, 3).bfloat16()
    opt = AdamW(model.parameters())
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    with pytest.raises(ValueError, match=r"parameter of shape \(3, 3\): not in this optimizer"):
        opt.master_weight(model.weight)


# 4


@pytest.mark.parametrize("stop", [1, 5])
@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize(("dtype", "setting"), WEIGHTS)
def test_case_04_a_resumed_run_equals_an_uninterrupted_one(dtype, setting, moments, stop):
    """karpathy/llm.c#522, OpenTau#185, KempnerForge#114, DeepSpeed#7786."""
    settings = {"lr": 1e-2, "master_weights": setting, "moments": moments, "seed": 3}
    whole = AdamW(parameters(dtype), **settings)
    train(whole, range(10))
    part = AdamW(parameters(dtype), **settings)
    train(part, range(stop))
    for _ in range(2):  # saved and loaded twice equals once
        saved = through_disk([part.state_dict(), part.param_groups[0]["params"]])
        part = AdamW(saved[1], **settings | {"seed": 99})
        part.load_state_dict(saved[0])
    train(part, range(stop, 10))
    assert_same_training(whole, part)


# 5


def test_case_05_a_plane_that_was_widened_on_its_way_is_refused():
    """NeMo/RL#4143, Megatron-LM#4222: int16 remainders saved as FP32, FP32 copied into int16."""
    p = constant(1.0, 4)
    opt = AdamW([p], master_weights="split")
    train(opt, range(2))
    before, saved = snapshot(opt), opt.state_dict()
    saved["state"] = copy.deepcopy(saved["state"])
    saved["state"][0]["remainder"] = saved["state"][0]["remainder"].float()
    message = r"parameter 0: saved remainder is float32, must be int16"
    with pytest.raises(ValueError, match=message):
        opt.load_state_dict(saved)
    assert_same_snapshot(before, snapshot(opt))


def test_case_05_a_master_weight_that_was_narrowed_on_its_way_is_refused():
    """NVIDIA/Megatron-LM#1359: the FP32 master came back as BF16."""
    opt = AdamW([constant(1.0, 4)], master_weights="fp32")
    train(opt, range(2))
    saved = opt.state_dict()
    saved["state"][0] = {
        k: t.bfloat16() if k == "master_weight" else t for k, t in saved["state"][0].items()
    }
    for setting in ("fp32", "split"):
        target = AdamW([constant(1.0, 4)], master_weights=setting)
        with pytest.raises(ValueError, match="saved master_weight is bfloat16, must be float32"):
            target.load_state_dict(saved)


@FLAT
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ({"master_weights": "fp32"}, {"master_weights": "split"}),
        ({"master_weights": "split"}, {"master_weights": "fp32"}),
        ({"master_weights": "split"}, {"master_weights": "split24"}),
        ({"moments": "fp32"}, {"moments": "bf16"}),
        ({"moments": "bf16-sr"}, {"moments": "fp32"}),
    ],
)
def test_case_05_a_raw_distributed_load_never_casts_between_formats(saved, loaded, flat, tmp_path):
    """NeMo/RL#4143: such a load checks only shapes, so each format has keys of its own."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, other = Net(), Net()
    a, b = AdamW(model.parameters(), **saved), AdamW(other.parameters(), **loaded)
    train(a, range(2))
    dcp.save(
        get_optimizer_state_dict(model, a, options=options), checkpoint_id=tmp_path, no_dist=True
    )
    with pytest.raises(CheckpointException, match="Missing key"):
        dcp.load(
            get_optimizer_state_dict(other, b, options=options),
            checkpoint_id=tmp_path,
            no_dist=True,
        )


# 6


@FLAT
@pytest.mark.parametrize("lr", [1e-2, torch.tensor(1e-2)], ids=["float", "tensor"])
@pytest.mark.parametrize("rule", RULES)
def test_case_06_asking_for_the_state_before_the_first_step_touches_nothing(rule, lr, flat):
    """Megatron-LM#5974 and #5976, DeepSpeed#5104, pytorch#139575: a fake step to make states."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, untouched = Net(), Net()
    opt = OPTIMIZERS[rule](model.parameters(), lr=lr)
    ref = OPTIMIZERS[rule](untouched.parameters(), lr=lr)
    get_optimizer_state_dict(model, opt, options=options)
    assert_same_training(opt, ref)
    assert all(state["step"] == 0 for state in opt.state.values())
    assert type(opt.param_groups[0]["lr"]) is type(lr) and opt.param_groups[0]["lr"] == lr
    train(opt, [0])
    train(ref, [0])
    assert_same_training(opt, ref)


@pytest.mark.parametrize(("dtype", "setting"), WEIGHTS)
@pytest.mark.parametrize("rule", RULES)
def test_case_06_a_step_without_learning_rate_or_gradient_is_neutral(rule, dtype, setting):
    """DeepSpeed#5104, pytorch#139575: other libraries make such a step to see the states."""
    opt = OPTIMIZERS[rule](parameters(dtype), master_weights=setting, weight_decay=0.1)
    params = opt.param_groups[0]["params"]
    params[0].data[0, 0] = -0.0
    train(opt, range(2))
    before = snapshot(opt)
    opt.param_groups[0]["lr"] = 0.0
    for p in params:
        p.grad = torch.zeros_like(p)
    opt.step()
    for old, new in zip(before, snapshot(opt), strict=True):
        for key in {"weight", "master", "remainder", "remainder8", "master_weight"} & old.keys():
            assert same(old[key], new[key]), key


# 7


def test_case_07_a_parameter_without_gradient_keeps_its_own_step():
    """DeepSpeed#8471, TransformerEngine#1986 and #3318: one counter for a whole group."""

    def make():
        return [constant(1.0, 9), constant(2.0, 5), constant(3.0, 4, dtype=torch.float32)]

    a, b, c = make()
    opt = AdamW([a, b, c], lr=1e-2)
    alone = [AdamW([p], lr=1e-2) for p in make()]
    torchs = [nn.Parameter(p.detach().float().clone()) for p in make()]
    theirs = [torch.optim.AdamW([p], lr=1e-2) for p in torchs]
    for step in range(20):
        feed([a, b, c], step)
        if step % 2 == 0:
            b.grad = None
        for mine, own, fp32, their in zip((a, b, c), alone, torchs, theirs, strict=True):
            if mine.grad is not None:
                own.param_groups[0]["params"][0].grad = mine.grad.clone()
                fp32.grad = mine.grad.float()
                own.step()
                their.step()
        opt.step()
    assert [opt.state[p]["step"].item() for p in (a, b, c)] == [20, 10, 20]
    for mine, own, fp32 in zip((a, b, c), alone, torchs, strict=True):
        assert_same_snapshot(
            [s for p, s in zip((a, b, c), snapshot(opt), strict=True) if p is mine], snapshot(own)
        )
        assert torch.allclose(opt.master_weight(mine), fp32.detach(), rtol=2e-6)


@pytest.mark.parametrize("rule", RULES)
def test_case_07_no_gradient_means_no_decay_no_moment_and_no_step(rule):
    """DeepSpeed#8471: frozen for five steps, then trained on as if nothing had been."""
    frozen, ref = constant(1.0, 6), constant(1.0, 6)
    opt, own = OPTIMIZERS[rule]([frozen, constant(1.0, 2)]), OPTIMIZERS[rule]([ref])
    train(opt, range(3))
    for step in range(3):
        feed([ref], step)
        own.step()
    before = snapshot(opt)[0]
    frozen.requires_grad_(False)
    frozen.grad = None
    for step in range(5):
        feed(opt.param_groups[0]["params"][1:], step)
        opt.step()
    assert_same_snapshot([before], snapshot(opt)[:1])
    frozen.requires_grad_(True)
    feed([frozen], 3)
    feed([ref], 3)
    opt.step()
    own.step()
    assert_same_snapshot(snapshot(opt)[:1], snapshot(own))


def test_case_07_a_first_gradient_at_step_100_moves_by_the_learning_rate():
    """DeepSpeed#8471: with the group's counter the first update was a tenth of it."""
    a, late = constant(0.0, 2, dtype=torch.float32), constant(0.0, 2)
    opt = AdamW([a, late], lr=1e-3)
    for _ in range(99):
        a.grad = torch.ones_like(a)
        opt.step()
    late.grad = torch.ones_like(late)
    opt.step()
    assert torch.allclose(opt.master_weight(late), torch.full((2,), -1e-3), rtol=1e-4)


@pytest.mark.parametrize("rule", RULES)
def test_case_07_empty_groups_step_save_and_load(rule):
    """NVIDIA/TransformerEngine#1986: an empty group on one rank never counted."""
    a, b = (
        OPTIMIZERS[rule]([{"params": [constant(1.0, 3)]}, {"params": [], "lr": 0.5}])
        for _ in range(2)
    )
    train(a, range(3))
    with torch.no_grad():
        b.param_groups[0]["params"][0].copy_(a.param_groups[0]["params"][0])
    b.load_state_dict(through_disk(a.state_dict()))
    assert_same_training(a, b)
    assert b.param_groups[1]["lr"] == 0.5 and b.param_groups[1]["params"] == []


# 8


def quarter_up(names=None, seed=0, size=30_000, dtype=torch.bfloat16, order=(0, 1), steps=1):
    """Weights of 1 moved a quarter of a BF16 step, rounded stochastically; True where up."""
    params = [constant(1.0, size, dtype=dtype) for _ in order]
    named = [(names[i], params[i]) for i in order] if names else params
    opt = SGD(named, lr=1.0, master_weights="bf16-sr", seed=seed)
    for _ in range(steps):
        for p in params:
            p.data.fill_(1.0)
            p.grad = torch.full_like(p, -(2.0**-9))
        opt.step()
    return [p.detach() > 1 for p in params]


def agreement(a, b):
    """How far the agreement of two masks is from independence, in standard deviations."""
    expected = 0.25**2 + 0.75**2
    found = (a == b).double().mean().item()
    return (found - expected) / math.sqrt(expected * (1 - expected) / a.numel())


def test_case_08_noise_differs_between_parameters_steps_seeds_and_states():
    """karpathy/llm.c#597, pytorch/ao#2296: tensors and layers shared their noise."""
    a, b = quarter_up()
    assert abs(agreement(a, b)) < 5
    assert abs(agreement(a, quarter_up(steps=2)[0])) < 5
    assert abs(agreement(a, quarter_up(seed=1)[0])) < 5
    assert abs(agreement(a, quarter_up(names=["v", "w"])[0])) < 5
    assert abs(agreement(a[:-1], a[1:])) < 5
    for gap in (2, 64, 256, 1024, 16384):
        assert abs(agreement(a[:-gap], a[gap:])) < 5


def test_case_08_noise_differs_between_the_weight_and_the_states_of_a_parameter():
    """karpathy/llm.c#702: the same bits for two tensors of one parameter correlate them."""
    p = constant(1.0, 30_000)
    opt = SGD([p], lr=1.0, momentum=0.5, master_weights="bf16-sr", moments="bf16-sr")
    p.grad_dtype = None
    p.grad = torch.full((30_000,), -1 - 2.0**-9)
    p.data.zero_()
    opt.step()
    up = opt.state[p]["momentum_buffer_bf16"] < -1
    assert abs(agreement(up, p > 1.0)) < 5


def test_case_08_replicas_agree_whatever_torchs_generator_holds():
    """Nerogar/OneTrainer#804: replicas drifted apart since each drew its own noise."""
    torch.manual_seed(1)
    a = quarter_up()[0]
    torch.manual_seed(2)
    before = torch.get_rng_state()
    b = quarter_up()[0]
    assert torch.equal(a, b)
    assert torch.equal(torch.get_rng_state(), before), "the user's generator is not ours"


def test_case_08_named_parameters_keep_their_noise_in_any_order():
    """karpathy/llm.c#597: the name decides, not the place in a list."""
    names = ["layer.0.weight", "layer.1.weight"]
    first, second = quarter_up(names=names)
    again, other = quarter_up(names=names, order=(1, 0))
    assert torch.equal(first, again) and torch.equal(second, other)


def test_case_08_parameters_of_one_name_in_two_groups_do_not_share_noise():
    """karpathy/llm.c#597: two models in one optimizer name their layers alike."""
    p, q = constant(1.0, 30_000), constant(1.0, 30_000)
    groups = [{"params": [("0.weight", p)]}, {"params": [("0.weight", q)]}]
    try:
        opt = SGD(groups, lr=1.0, master_weights="bf16-sr")
    except ValueError as refusal:
        assert "0.weight" in str(refusal)
        return
    p.grad, q.grad = (torch.full_like(p, -(2.0**-9)) for _ in range(2))
    opt.step()
    assert abs(agreement(p > 1, q > 1)) < 5


def test_case_08_noise_follows_the_logical_index_whatever_the_strides():
    """pytorch/ao#2296: layouts may not change what an element is rounded to."""
    gradient = torch.full((300, 300), -(2.0**-9))
    rows, columns = constant(1.0, 300, 300), nn.Parameter(constant(1.0, 300, 300).data.t())
    gaps = nn.Parameter(constant(1.0, 300, 600).data[:, ::2])
    for p in (rows, columns, gaps):
        p.grad = gradient.to(p.dtype)
        SGD([p], lr=1.0, master_weights="bf16-sr").step()
    assert torch.equal(rows, columns) and torch.equal(rows, gaps)


def test_case_08_stochastic_rounding_is_unbiased():
    """pytorch/ao#2296: mean of a million roundings within four standard deviations."""
    (up,) = quarter_up(size=1_000_000, order=(0,))
    assert abs(up.double().mean().item() - 0.25) < 4 * math.sqrt(0.25 * 0.75 / 1e6)


# 9


def test_case_09_weight_decay_acts_without_gradients():
    """Nerogar/OneTrainer#996, pytorch#64475: a decay rounded on its own never shows in BF16."""
    found = {}
    for setting in ("split", "fp32", "bf16-sr"):
        p = constant(1.0, 1000)
        opt = AdamW([p], lr=1e-3, weight_decay=0.1, master_weights=setting)
        p.grad = torch.zeros_like(p)
        for _ in range(1000):
            opt.step()
        found[setting] = opt.master_weight(p).double().mean().item()
    exact = (1 - 1e-4) ** 1000
    assert found["split"] == found["fp32"]
    assert math.isclose(found["split"], exact, rel_tol=1e-5)
    assert abs(found["bf16-sr"] - exact) < 0.01


def test_case_09_a_decay_below_the_last_bit_shows_in_the_mean():
    """pytorch#64475: in FP32 1 - lr*wd is 1 for lr*wd under 3e-8; subtracted with the update, the
    decay survives on average, as in float64."""

    def mean_after(decay, dtype):
        p = nn.Parameter(torch.ones(1000, dtype=dtype))
        make = torch.optim.AdamW if dtype == torch.float64 else AdamW
        opt = make([p], lr=1e-4, weight_decay=decay)
        generator = torch.Generator().manual_seed(0)
        for _ in range(200):
            p.grad = torch.randn(1000, generator=generator).to(dtype)
            opt.step()
        return p.detach().double().mean().item()

    exact = mean_after(0.0, torch.float64) - mean_after(1e-4, torch.float64)
    found = mean_after(0.0, torch.float32) - mean_after(1e-4, torch.float32)
    assert math.isclose(found, exact, rel_tol=0.05)


# 10


def second_moment(moments, betas, steps):
    """Mean of v over a thousand elements after one gradient of 1 and then only zeros."""
    p = constant(0.0, 1000)
    opt = AdamW([p], lr=0.0, betas=betas, moments=moments)
    p.grad = torch.ones_like(p)
    for _ in range(steps + 1):
        opt.step()
        p.grad = torch.zeros_like(p)
    state = opt.state[p]
    return next(t for k, t in state.items() if k.startswith("exp_avg_sq")).double().mean().item()


def test_case_10_stochastic_second_moments_decay_and_nearest_ones_stick():
    """NeMo/Automodel#2248, halo#30, OneTrainer#1005: nearest rounding loses small changes.

    The sticking is the known price of ``moments="bf16"``; this holds it as documented.
    """
    exact = 0.001 * 0.999**400
    assert math.isclose(second_moment(("fp32", "bf16-sr"), (0.9, 0.999), 400), exact, rel_tol=0.1)
    assert math.isclose(second_moment(("fp32", "fp32"), (0.9, 0.999), 400), exact, rel_tol=1e-3)
    assert math.isclose(second_moment(("fp32", "bf16"), (0.9, 0.999), 400), 0.001, rel_tol=0.01)


@pytest.mark.parametrize("moments", MOMENTS)
def test_case_10_betas_are_not_rounded_to_the_moments_format(moments):
    """tenstorrent/tt-metal#55935: betas were cut to BF16, 0.999 became 0.996."""
    three, four = (second_moment(moments, (0.9, beta), 0) for beta in (0.999, 0.9999))
    assert math.isclose(three, 1e-3, rel_tol=0.01) and math.isclose(four, 1e-4, rel_tol=0.01)


# 11


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("rule", RULES)
def test_case_11_a_skipped_step_changes_nothing_and_says_so(rule, bad, caplog):
    """DeepSpeed#8035 and #8415: no check at first, then steps skipped in silence."""
    opt = OPTIMIZERS[rule](parameters(), on_nonfinite="skip")
    ref = OPTIMIZERS[rule](parameters())
    train(opt, range(2))
    train(ref, range(2))
    before = snapshot(opt)
    params = opt.param_groups[0]["params"]
    feed(params, 2)
    params[0].grad[3, 1] = bad
    with caplog.at_level(logging.WARNING):
        opt.step()
    assert opt.step_was_skipped
    assert "step skipped: parameter 0 has a gradient that is not finite" in caplog.text
    assert_same_snapshot(before, snapshot(opt))
    train(opt, [3])
    train(ref, [3])
    assert not opt.step_was_skipped
    assert_same_training(opt, ref)


@pytest.mark.parametrize("policy", ["skip", "raise"])
def test_case_11_a_step_that_is_not_taken_uses_up_its_clip_coefficient(policy):
    """DeepSpeed#8415: what belonged to the bad gradients may not leak into the next step."""
    opt, ref = (AdamW([constant(1.0, 4)], on_nonfinite=policy) for _ in range(2))
    (p,) = opt.param_groups[0]["params"]
    p.grad = torch.full_like(p, math.inf)
    opt.clip_grad_norm(1.0)
    with pytest.raises(ValueError) if policy == "raise" else contextlib.nullcontext():
        opt.step()
    train(opt, [0])
    train(ref, [0])
    assert_same_training(opt, ref)


@pytest.mark.parametrize("named", [False, True])
def test_case_11_raising_names_the_parameter_and_writes_nothing(named):
    """DeepSpeed#8035: one Inf ruins master and moments for good unless it is stopped before."""
    a, b = constant(1.0, 4), constant(1.0, 4)
    opt = AdamW([("a", a), ("b", b)] if named else [a, b], on_nonfinite="raise")
    before = snapshot(opt)
    feed([a, b], 0)
    b.grad[2] = math.inf
    label = "parameter 'b'" if named else "parameter 1"
    message = f"{label} has a gradient that is not finite: lower lr, or use on_nonfinite='skip'"
    with pytest.raises(ValueError, match=message):
        opt.step()
    assert_same_snapshot(before, snapshot(opt))


def test_case_11_an_infinity_in_one_of_several_micro_batches_is_seen():
    """DeepSpeed#8415: an Inf that was added up in FP32 skips the step too."""
    p = constant(1.0, 2)
    opt = AdamW([p], on_nonfinite="skip")
    opt.accumulate_in_fp32()
    before = snapshot(opt)
    for factor in (1.0, math.inf, 1.0):
        (p * factor).sum().backward()
    opt.step()
    assert opt.step_was_skipped
    assert_same_snapshot(before, snapshot(opt))


def test_case_11_a_group_may_not_ask_for_a_policy_that_is_ignored():
    """DeepSpeed#8415: a chosen policy holds, or is refused; either will do."""
    p, q = constant(1.0, 2), constant(1.0, 2)
    try:
        opt = AdamW([{"params": [p], "on_nonfinite": "skip"}, {"params": [q]}])
    except ValueError as refusal:
        assert "on_nonfinite" in str(refusal)
        return
    p.grad = torch.full_like(p, math.inf)
    opt.step()
    assert opt.step_was_skipped and torch.equal(p, torch.ones_like(p))


# 12


def test_case_12_the_step_counts_on_under_a_bf16_default_dtype():
    """pytorch/ao#4915, DeepSpeed#8496: a BF16 counter stops at 256."""

    def run():
        p = constant(1.0, 5)
        opt = AdamW([p], lr=1e-4)
        for _ in range(1000):
            p.grad = torch.full((5,), 0.1, dtype=torch.bfloat16)
            opt.step()
        return opt

    ref = run()
    torch.set_default_dtype(torch.bfloat16)
    try:
        opt = run()
        state = next(iter(opt.state.values()))
        assert state["step"].dtype == torch.float32 and state["step"] == 1000
        assert_same_training(opt, ref)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.bfloat16, 256), (torch.float16, 2048)])
def test_case_12_a_narrow_saved_step_is_reported_and_counts_on(dtype, limit):
    """pytorch/ao#4915, speculators#411: the lost count cannot be had back, so warn."""
    opt = AdamW([constant(1.0, 5)], lr=1e-4)
    train(opt, range(3))
    saved = opt.state_dict()
    saved["state"][0] = {**saved["state"][0], "step": torch.tensor(256.0, dtype=dtype)}
    with pytest.warns(UserWarning, match=f"parameter 0: its saved step 256 .* counting at {limit}"):
        opt.load_state_dict(saved)
    train(opt, range(10))
    state = next(iter(opt.state.values()))
    assert state["step"].dtype == torch.float32 and state["step"] == 266


# 13


@pytest.mark.parametrize("reloaded", [False, True])
@pytest.mark.parametrize("setting", ["auto", "split", "fp32", "split24"])
def test_case_13_master_weights_take_effect_when_asked_for(setting, reloaded):
    """NVIDIA/apex#1728, accelerate#3979, Model-Optimizer#2322: no error, and no master."""
    p, ref = constant(1.0, 8), constant(1.0, 8, dtype=torch.float32)
    opt, fp32 = AdamW([p], lr=1e-4, master_weights=setting), AdamW([ref], lr=1e-4)
    for _ in range(50):
        p.grad, ref.grad = torch.ones_like(p), torch.ones_like(ref)
        if reloaded:
            saved, params = through_disk([opt.state_dict(), [p]])
            (p,) = params
            opt = AdamW([p], lr=1e-4, master_weights=setting)
            opt.load_state_dict(saved)
            p.grad = torch.ones_like(p)
        opt.step()
        fp32.step()
    assert (p != 1).all()
    if setting == "split24":
        # Each step of 1e-4 is rounded to a multiple of 2^-16, always the same way here.
        assert torch.allclose(1 - opt.master_weight(p), 1 - ref.detach(), rtol=0.1)
    else:
        assert same(opt.master_weight(p), ref.detach())


def test_case_13_without_master_weights_small_updates_vanish():
    """The control: norm weights at exactly 1.0 never move."""
    p = constant(1.0, 8)
    opt = AdamW([p], lr=1e-4, master_weights="bf16")
    for _ in range(50):
        p.grad = torch.ones_like(p)
        opt.step()
    assert torch.equal(p, torch.ones_like(p))


def test_case_13_memory_shows_what_every_setting_really_keeps():
    """NVIDIA/apex#1728: the bytes tell whether an option took effect."""
    extra = {"auto": 2, "split": 2, "split24": 1, "fp32": 4, "bf16": 0, "bf16-sr": 0}
    assert extra.keys() == MASTER_WEIGHTS[torch.bfloat16].keys()
    for setting, bytes_each in extra.items():
        opt = AdamW([constant(1.0, 1000)], master_weights=setting)
        kept = opt.memory().components.get("master_weights", {})
        assert sum(kept.values()) == 1000 * bytes_each, setting


# 17


@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_case_17_several_backward_passes_make_one_step(max_norm):
    """pytorch#124523, torchtune#1934: one update for each micro-batch instead of each batch."""
    p, ref = constant(1.0, 50), constant(1.0, 50)
    opt, plain = AdamW([p], lr=1e-2), AdamW([ref], lr=1e-2)
    ref.grad_dtype = None
    handle = opt.accumulate_in_fp32()
    for step in range(3):
        total = torch.zeros(50)
        for micro in range(4):
            generator = torch.Generator().manual_seed(10 * step + micro)
            factor = torch.randn(50, generator=generator).bfloat16()
            (p * factor).sum().backward()
            total += factor.float()
        ref.grad = total
        if max_norm is not None:
            assert opt.clip_grad_norm(max_norm) == plain.clip_grad_norm(max_norm)
        opt.step()
        plain.step()
        opt.zero_grad()
    assert opt.state[p]["step"] == 3
    assert_same_training(opt, plain)
    handle.close()


def test_case_17_a_tied_weight_steps_once():
    """pytorch#124523: a parameter used twice in the graph has one update."""
    model = Net()
    opt = AdamW(model.parameters())
    opt.accumulate_in_fp32()
    model(torch.tensor([1, 2])).sum().backward()
    opt.step()
    assert opt.state[model.embed.weight]["step"] == 1
    assert len(opt.state) == len(list(model.parameters()))


# 18


def restore(model, opt, other, fresh, way):
    """Carry the state of an optimizer to a fresh one, by torch or by distributed checkpoint."""
    other.load_state_dict(model.state_dict())
    if way == "torch":
        fresh.load_state_dict(through_disk(opt.state_dict()))
    else:
        options = StateDictOptions(flatten_optimizer_state_dict=way == "flat")
        saved = get_optimizer_state_dict(model, opt, options=options)
        set_optimizer_state_dict(other, fresh, copy.deepcopy(saved), options=options)


@pytest.mark.parametrize("way", ["torch", "nested", "flat"])
@pytest.mark.parametrize("lr", [1e-3, torch.tensor(1e-3)], ids=["float", "tensor"])
def test_case_18_learning_rates_and_user_keys_survive_a_load(lr, way):
    """pytorch#129079, #126948, #139575: lr, initial_lr and its type were lost."""

    def make(net):
        groups = [
            {"params": [net.embed.weight, net.scale], "role": 7},
            {"params": list(net.body.parameters()), "lr": 5e-4, "weight_decay": 0.3, "role": 8},
        ]
        return AdamW(groups, lr=copy.deepcopy(lr))

    def schedule(opt):  # before loading: torch unflattens only keys that are there
        return torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 0.9**step)

    model = Net()
    opt = make(model)
    scheduler = schedule(opt)
    for step in range(5):
        train(opt, [step])
        scheduler.step()
    other = Net()
    fresh = make(other)
    resumed = schedule(fresh)
    restore(model, opt, other, fresh, way)
    resumed.load_state_dict(scheduler.state_dict())
    for group, loaded in zip(opt.param_groups, fresh.param_groups, strict=True):
        for key in group.keys() - {"params"}:
            assert group[key] == loaded[key], key
            assert type(group[key]) is type(loaded[key]), key
    for step in range(5, 10):
        train(opt, [step])
        train(fresh, [step])
        scheduler.step()
        resumed.step()
        assert [g["lr"] for g in opt.param_groups] == [g["lr"] for g in fresh.param_groups]
    assert_same_training(opt, fresh)


def test_case_18_groups_never_share_a_tensor_learning_rate():
    """pytorch#162359 and #163098: a scheduler that wrote into one changed the other."""
    lr = torch.tensor(1e-3)
    opt = AdamW([{"params": [constant(1.0, 2)]}, {"params": [constant(1.0, 2)]}], lr=lr)
    opt.add_param_group({"params": [constant(1.0, 2)]})
    for _ in range(2):
        opt.param_groups[0]["lr"].fill_(0.5)
        assert [group["lr"].item() for group in opt.param_groups[1:]] == [lr.item()] * 2
        assert lr.item() == torch.tensor(1e-3).item()
        opt.param_groups[0]["lr"].fill_(lr.item())
        opt.load_state_dict(opt.state_dict())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64])
def test_case_18_a_learning_rate_that_cannot_be_scheduled_is_widened_or_refused(dtype):
    """pytorch#129079: a scheduler would write every later rate into 8 bits, or into an integer."""
    try:
        opt = AdamW([constant(1.0, 2)], lr=torch.tensor(1.0, dtype=dtype))
    except ValueError as refusal:
        assert "lr" in str(refusal)
    else:
        assert opt.param_groups[0]["lr"].dtype in (torch.float32, torch.float64)


# 19


@pytest.mark.parametrize("moments", ["bf16", "bf16-sr"])
def test_case_19_low_precision_moments_of_fp32_parameters_stay_so(moments):
    """pytorch/torchtitan#4615, OpenTau#184: moments silently became FP32 on resume."""
    opt = AdamW([nn.Parameter(torch.linspace(-1, 1, 64))], lr=1e-3, moments=moments)
    train(opt, range(2))
    saved, params = through_disk([opt.state_dict(), opt.param_groups[0]["params"]])
    resumed = AdamW(params, lr=1e-3, moments=moments)
    resumed.load_state_dict(saved)
    (state,) = resumed.state.values()
    assert state["exp_avg_bf16"].dtype == state["exp_avg_sq_bf16"].dtype == torch.bfloat16
    params[0].grad = opt.param_groups[0]["params"][0].grad.clone()
    assert resumed.memory() == opt.memory()
    train(opt, [2])
    train(resumed, [2])
    assert_same_training(opt, resumed)


def test_case_19_moments_of_another_format_are_not_narrowed_in_silence():
    """pytorch/torchtitan#4615: convert with a warning, or refuse."""
    opt = AdamW([constant(1.0, 4)], moments="fp32")
    train(opt, range(2))
    target = AdamW([constant(1.0, 4)], moments="bf16")
    with pytest.raises(ValueError, match="parameter 0: exp_avg: fp32 to bf16 would round"):
        target.load_state_dict(opt.state_dict())
    with pytest.warns(UserWarning, match="load_state_dict rounded exp_avg: fp32 to bf16"):
        target.load_state_dict(opt.state_dict(), convert=True)


# 22


@pytest.mark.parametrize("rule", RULES)
def test_case_22_a_compiled_step_gives_the_same_bits_without_recompiling(rule):
    """karpathy/nanochat#527, pytorch/ao#2500, pytorch#107076 and #133898."""

    def make():
        opt = OPTIMIZERS[rule]([*parameters(torch.bfloat16), *parameters(torch.float32)])
        return opt, torch.optim.lr_scheduler.CosineAnnealingLR(opt, 20)

    (eager, schedule), (compiled, compiled_schedule) = make(), make()
    counter = CompileCounter()
    step = torch.compile(compiled.step, backend=counter)
    for number in range(20):
        train(eager, [number])
        feed(compiled.param_groups[0]["params"], number)
        step()
        schedule.step()
        compiled_schedule.step()
    assert counter.frame_count <= 2
    assert_same_training(eager, compiled)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_case_22_a_compiled_model_trains_to_the_same_bits(backend):
    """pytorch/ao#2500, pytorch#133898: compiled forward and backward, opaque step."""
    tokens = torch.tensor([[1, 2, 3], [3, 4, 5]])
    models = [Net(), Net()]
    forwards = [models[0], torch.compile(models[1], backend=backend)]
    opts = [AdamW(model.parameters(), lr=1e-2) for model in models]
    for _ in range(5):
        for forward, opt in zip(forwards, opts, strict=True):
            forward(tokens).square().mean().backward()
            opt.step()
            opt.zero_grad()
    assert_same_training(*opts)


def test_case_22_a_compiled_training_loop_breaks_at_the_step_and_keeps_its_bits():
    """karpathy/nanochat#527, pytorch#107076: users compile forward, backward and step in one."""
    tokens = torch.tensor([[1, 2, 3], [3, 4, 5]])
    models = [Net(), Net()]
    opts = [AdamW(model.parameters(), lr=1e-2, moments="bf16-sr") for model in models]

    def iteration(model, opt):
        loss = model(tokens).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    compiled = torch.compile(iteration, backend="eager")
    for _ in range(4):
        assert torch.equal(iteration(models[0], opts[0]), compiled(models[1], opts[1]))
    assert_same_training(*opts)


# 23


def test_case_23_memory_counts_each_storage_once():
    """pytorch#97712, flashoptim#1: ties and views were counted twice, temporaries not at all."""
    model = Net()
    opt = AdamW(model.parameters())
    low, full = 6 * 4 + 4 * 4 + 4, 4  # BF16 and FP32 elements; the head is the embedding
    memory = opt.memory()
    assert memory.num_parameters == low + full
    assert memory.components == {
        "weights": {"bfloat16": 2 * low, "float32": 4 * full},
        "master_weights": {"remainder": 2 * low},
        "moments": {"exp_avg": 4 * (low + full), "exp_avg_sq": 4 * (low + full)},
        "scalars": {"step": 4 * 4},
    }
    train(opt, [0])
    assert opt.memory().components["gradients"] == {"bfloat16": 2 * low, "float32": 4 * full}
    held = [t for p in model.parameters() for t in (p, p.grad, *opt.state[p].values())]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
    assert opt.memory().total_bytes == sum(storages.values())


def test_case_23_an_optimizer_that_is_let_go_frees_its_states_and_hooks():
    """flashoptim#1: what earlier optimizers held distorted later measurements."""
    p = constant(1.0, 100)
    opt = Adam([p])
    opt.accumulate_in_fp32()
    (p * 2).sum().backward()
    opt.step()
    gone = [weakref.ref(opt), *(weakref.ref(tensor) for tensor in opt.state[p].values())]
    opt.accumulate_in_fp32().close()
    del opt
    gc.collect()
    assert all(reference() is None for reference in gone)
    (p * 2).sum().backward()
    assert p.grad is not None

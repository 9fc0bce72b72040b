"""Stopping, saving, loading and going on: equal bit for bit to never having stopped."""

import copy
import pickle
import warnings
from itertools import permutations, product

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import lr_scheduler

import halfword
from halfword import SGD, Adam, AdamW, Lion
from halfword.formats import MOMENTS
from halfword.rules import RULES
from helpers import (
    OPTIMIZERS,
    WEIGHTS,
    assert_same_snapshot,
    assert_same_training,
    combinations,
    constant,
    feed,
    name_of,
    parameters,
    pattern,
    same,
    snapshot,
    threads,
    through_disk,
    train,
)


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """On a busy machine, threads that share an operation mostly wait for each other."""
    with threads(1):
        yield


def params_of(opt):
    return [p for group in opt.param_groups for p in group["params"]]


def make(combination, params=None, **more):
    rule, dtype, master_weights, moments = combination
    params = parameters(dtype) if params is None else params
    settings = {"master_weights": master_weights, "moments": moments or "fp32"}
    return OPTIMIZERS[rule](params, **settings | more)


def resumed(opt, combination):
    """A new optimizer over new parameters, with everything that files keep of ``opt``."""
    weights, saved = through_disk([[p.detach() for p in params_of(opt)], opt.state_dict()])
    fresh = make(combination, [nn.Parameter(torch.zeros_like(w)) for w in weights], seed=1)
    with torch.no_grad():
        for p, weight in zip(params_of(fresh), weights, strict=True):
            p.copy_(weight)
    fresh.load_state_dict(saved)
    return fresh


@pytest.mark.parametrize("combination", combinations(), ids=name_of)
def test_a_run_that_was_stopped_and_resumed_equals_one_that_was_not(combination):
    whole = make(combination, seed=5)
    train(whole, range(4))
    part = make(combination, seed=5)
    train(part, range(2))
    once = resumed(part, combination)
    assert_same_training(part, once)
    train(once, range(2, 4))
    assert_same_training(whole, once)
    twice = resumed(resumed(part, combination), combination)
    train(twice, range(2, 4))
    assert_same_training(whole, twice)


def copies(opt):
    return copy.deepcopy(opt), pickle.loads(pickle.dumps(opt))


@pytest.mark.parametrize("combination", combinations(), ids=name_of)
def test_a_deep_or_pickled_copy_trains_on_alike_and_shares_nothing(combination):
    opt = make(combination, seed=5)
    train(opt, range(2))
    before, others = snapshot(opt), copies(opt)
    train(opt, [2])
    for other in others:
        assert other.defaults == opt.defaults
        assert_same_snapshot(before, snapshot(other))
        train(other, [2])
        assert_same_training(opt, other)


def test_a_copy_keeps_every_setting_of_every_group():
    groups = [
        {"params": [constant(1.0, 3)], "moments": ("bf16", "fp32"), "seed": 3},
        {"params": [constant(1.0, 3)], "master_weights": "split24", "lr": torch.tensor(0.5)},
    ]
    opt = AdamW(groups, on_nonfinite="skip", backend="reference", maximize=True)
    for other in copies(opt):
        for group, copied in zip(opt.param_groups, other.param_groups, strict=True):
            for key in group.keys() - {"params"}:
                assert group[key] == copied[key], key
        (p, _) = params_of(other)
        p.grad = torch.full_like(p, torch.inf)
        other.step()
        assert other.step_was_skipped


def test_a_state_dict_is_not_an_alias_after_loading():
    a, b = AdamW([constant(1.0, 3)]), AdamW([constant(1.0, 3)])
    train(a, range(2))
    b.load_state_dict(a.state_dict())
    before = snapshot(b)
    train(a, [2])
    assert_same_snapshot(before, snapshot(b))


def test_loading_a_state_dict_leaves_it_as_it_was():
    opt = AdamW([constant(1.0, 3)], lr=torch.tensor(1e-3))
    train(opt, range(2))
    saved = opt.state_dict()
    kept = copy.deepcopy(saved)
    opt.load_state_dict(saved)
    assert saved["param_groups"] == kept["param_groups"]
    for key, tensor in kept["state"][0].items():
        assert same(saved["state"][0][key], tensor)


def test_seed_and_identities_come_from_the_checkpoint_and_choices_from_the_receiver():
    opt = AdamW([("first", constant(1.0, 3))], seed=7, on_nonfinite="raise", foreach=True)
    other = AdamW(
        [("second", constant(1.0, 3))],
        seed=1,
        on_nonfinite="skip",
        backend="reference",
        foreach=False,
    )
    other.load_state_dict(opt.state_dict())
    (group,), (saved,) = other.param_groups, opt.param_groups
    assert group["seed"] == 7 and group["identities"] == saved["identities"]
    assert [group[k] for k in ("on_nonfinite", "backend", "foreach")] == [
        "skip",
        "reference",
        False,
    ]
    assert other.defaults["on_nonfinite"] == "skip"


# A nested one cannot be regrouped: torch loses the settings of all groups but one.
@pytest.mark.parametrize(
    ("flat", "regrouped"),
    [(False, False), (True, False), (True, True)],
    ids=["nested", "flat", "flat-regrouped"],
)
def test_distributed_checkpoints_match_noise_by_name_whatever_the_order(flat, regrouped):
    """They are keyed by name, so the groups that load may list parameters in another order."""
    torch.manual_seed(0)
    settings = {"lr": 1e-2, "master_weights": "bf16-sr", "moments": "bf16-sr"}
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, other = (nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).bfloat16() for _ in range(2))
    opt = AdamW(model.named_parameters(), **settings)
    backwards = list(other.named_parameters())[::-1]
    groups = [{"params": backwards[:1]}, {"params": backwards[1:]}] if regrouped else backwards
    fresh = AdamW(groups, **settings)

    def step(net, optimizer, number):
        for position, p in enumerate(net.parameters()):
            feed([p], 10 * number + position)
        optimizer.step()

    step(model, opt, 0)
    other.load_state_dict(model.state_dict())
    saved = get_optimizer_state_dict(model, opt, options=options)
    set_optimizer_state_dict(other, fresh, copy.deepcopy(saved), options=options)
    step(model, opt, 1)
    step(other, fresh, 1)
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        assert same(p.detach(), q.detach()), name


# Conversions between formats.

HOLDS = {
    "fp32": {"fp32", "bf16", "bf16-sr"},
    "bf16": {"bf16", "bf16-sr"},
    "bf16-sr": {"bf16", "bf16-sr"},
}
"""Which moments a format holds without rounding."""

MASTERS = {
    "split": {"split", "fp32", "split24", "bf16", "bf16-sr"},
    "fp32": {"split", "fp32", "split24", "bf16", "bf16-sr"},
    "split24": {"split24", "bf16", "bf16-sr"},
    "bf16": {"bf16", "bf16-sr"},
    "bf16-sr": {"bf16", "bf16-sr"},
}
"""Which master weights of BF16 parameters a setting holds without rounding."""


def test_every_format_has_its_conversions_stated_here():
    assert set(HOLDS) == set(MOMENTS) - {"int8"}  # see tests/formats/test_block8.py
    assert {s for d, s in WEIGHTS if d == torch.bfloat16} == set(MASTERS) - {"split"} | {"auto"}


def saved_run(**settings):
    """The weights and state dict of a short run, with awkward values in it."""
    opt = AdamW(parameters(), lr=1e-2, **settings)
    train(opt, range(3))
    params_of(opt)[0].data[0] = torch.tensor([torch.nan, torch.inf, -0.0])
    return opt, through_disk(opt.state_dict())


def receiver(opt, **settings):
    other = AdamW([nn.Parameter(p.detach().clone()) for p in params_of(opt)], **settings)
    return other


@pytest.mark.parametrize(("source", "target"), list(product(MASTERS, repeat=2)))
def test_master_weights_convert_exactly_or_not_at_all(source, target):
    opt, saved = saved_run(master_weights=source)
    other = receiver(opt, master_weights=target)
    before = snapshot(other)
    masters = [opt.master_weight(p) for p in params_of(opt)]
    if source in MASTERS[target]:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            other.load_state_dict(saved)
        for p, q, master in zip(params_of(opt), params_of(other), masters, strict=True):
            assert same(other.master_weight(q), master)
            assert same(q.detach(), p.detach()), "no weight moves in an exact conversion"
        return
    names = {"fp32": r"bf16\+fp32"}
    message = f"parameter 0: master weight: {names.get(source, source)} to {target} would round"
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(saved)
    assert_same_snapshot(before, snapshot(other))
    warning = f"rounded master weight: {names.get(source, source)} to {target} .5 parameters."
    with pytest.warns(UserWarning, match=warning):
        other.load_state_dict(saved, convert=True)
    precision = {"split24": 2.0**-16, "bf16": 2.0**-8, "bf16-sr": 2.0**-7}[target]
    for q, master in zip(params_of(other), masters, strict=True):
        found = other.master_weight(q)
        assert torch.allclose(found, master, rtol=precision, atol=0, equal_nan=True)


@pytest.mark.parametrize(("source", "target"), list(product(HOLDS, repeat=2)))
def test_moments_convert_exactly_or_not_at_all(source, target):
    opt, saved = saved_run(moments=source)
    other = receiver(opt, moments=target)
    before = snapshot(other)
    if source in HOLDS[target]:
        other.load_state_dict(saved)
        for p, q in zip(params_of(opt), params_of(other), strict=True):
            for slot in ("exp_avg", "exp_avg_sq"):
                assert same(value_of(opt, p, slot), value_of(other, q, slot))
        return
    message = f"parameter 0: exp_avg: {source} to {target} would round"
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(saved)
    assert_same_snapshot(before, snapshot(other))
    with pytest.warns(UserWarning) as caught:
        other.load_state_dict(saved, convert=True)
    (text,) = [str(w.message) for w in caught]
    for slot in ("exp_avg", "exp_avg_sq"):
        assert f"{slot}: {source} to {target} (5 parameters)" in text
    for p, q in zip(params_of(opt), params_of(other), strict=True):
        for slot in ("exp_avg", "exp_avg_sq"):
            exact, found = value_of(opt, p, slot), value_of(other, q, slot)
            assert torch.allclose(found, exact, rtol=2.0**-7, atol=0, equal_nan=True)


def value_of(opt, p, slot):
    """The FP32 values of a slot, whatever it is kept in."""
    state = opt.state[p]
    return next(state[key] for key in (slot, f"{slot}_bf16") if key in state).float()


def test_one_moment_may_convert_while_another_is_refused():
    opt, saved = saved_run(moments=("bf16", "fp32"))
    with pytest.raises(ValueError, match="parameter 0: exp_avg_sq: .* to bf16-sr would round"):
        receiver(opt, moments=("fp32", "bf16-sr")).load_state_dict(saved)


def test_a_refused_load_changes_nothing_at_all():
    """Also where the first parameters would have been loaded before the bad one was met."""
    opt, saved = saved_run()
    other = receiver(opt)
    train(other, range(4))
    before, groups = snapshot(other), copy.deepcopy(other.state_dict()["param_groups"])
    for damage in (
        lambda s: s["state"][3].update(exp_avg=torch.zeros(3)),
        lambda s: s["state"][3].update(exp_avg="lost"),
        lambda s: s["state"][3].update(max_exp_avg_sq=torch.zeros(4, 6)),
        lambda s: s["param_groups"][0].update(lr=-1.0),
        lambda s: s["param_groups"][0].update(amsgrad=True),
        lambda s: s["param_groups"][0].update(params=[0, 1]),
        lambda s: s["param_groups"].append(s["param_groups"][0]),
    ):
        broken = copy.deepcopy(saved)
        damage(broken)
        with pytest.raises(ValueError):
            other.load_state_dict(broken)
        assert_same_snapshot(before, snapshot(other))
        assert other.state_dict()["param_groups"] == groups


@pytest.mark.parametrize(
    ("source", "target"),
    [*permutations(["adamw", "lion", "sgd_momentum"], 2), ("sgd", "adamw"), ("adamw", "sgd")],
)
def test_a_state_of_another_rule_is_refused(source, target):
    """Taking over one moment and the step while another starts at zero would be a silent fault."""
    opt, other = OPTIMIZERS[source]([constant(1.0, 3)]), OPTIMIZERS[target]([constant(1.0, 3)])
    train(opt, range(3))
    with pytest.raises(ValueError, match="parameter 0"):
        other.load_state_dict(opt.state_dict())


def test_weights_of_another_dtype_take_their_masters_along():
    """BF16 weights with a remainder become FP32 weights, from either model file."""
    opt, saved = saved_run(master_weights="split")
    masters = [opt.master_weight(p) for p in params_of(opt)]
    for weights in ([p.detach().float() for p in params_of(opt)], masters):
        wide = AdamW([nn.Parameter(w.clone()) for w in weights])
        wide.load_state_dict(saved)
        for p, master in zip(params_of(wide), masters, strict=True):
            assert same(p.detach(), master)


# torch.optim's own state dicts.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("moments", ["fp32", "bf16", "bf16-sr"])
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("AdamW", {}),
        ("AdamW", {"lr": torch.tensor(1e-3), "maximize": True}),
        ("Adam", {"weight_decay": 0.1}),
        ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}),
        ("SGD", {"lr": 0.1}),
    ],
)
def test_a_state_dict_of_torch_is_taken_over(name, settings, moments, dtype):
    theirs = getattr(torch.optim, name)(parameters(dtype), **settings)
    train(theirs, range(5))
    ours = getattr(halfword, name)(
        [nn.Parameter(p.detach().clone()) for p in params_of(theirs)],
        moments=moments,
        **{"momentum": 0.5} if "momentum" in settings else {},
    )
    has_moments = any(set(state) - {"step"} for state in theirs.state_dict()["state"].values())
    if has_moments and dtype == torch.float32 and moments != "fp32":
        with pytest.raises(ValueError, match="would round"):
            ours.load_state_dict(through_disk(theirs.state_dict()))
        return
    ours.load_state_dict(through_disk(theirs.state_dict()))
    for p, q in zip(params_of(theirs), params_of(ours), strict=True):
        assert same(ours.master_weight(q), p.detach().float())
        for slot in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
            if slot in theirs.state[p]:
                assert same(value_of(ours, q, slot), theirs.state[p][slot].float())
    group, saved = ours.param_groups[0], theirs.param_groups[0]
    for key in ("lr", "betas", "eps", "weight_decay", "momentum", "nesterov", "maximize"):
        assert group.get(key) == saved.get(key)
    if dtype == torch.float32:
        train(theirs, range(5, 15))
        train(ours, range(5, 15))
        for p, q in zip(params_of(theirs), params_of(ours), strict=True):
            assert torch.allclose(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fused", [False, True])
def test_torchs_step_counts_on_in_the_bias_correction(fused):
    p = nn.Parameter(torch.ones(3))
    theirs = torch.optim.AdamW([p], lr=0.1, fused=fused)
    train(theirs, range(7))
    q = nn.Parameter(p.detach().clone())
    ours = AdamW([q])
    ours.load_state_dict(theirs.state_dict())
    assert ours.state[q]["step"] == 7
    train(theirs, [7])
    train(ours, [7])
    assert torch.allclose(p, q, rtol=1e-6)


def test_torchs_amsgrad_state_is_refused():
    theirs = torch.optim.AdamW([nn.Parameter(torch.ones(3))], amsgrad=True)
    train(theirs, range(2))
    with pytest.raises(ValueError, match="amsgrad=True: not supported"):
        AdamW([nn.Parameter(torch.ones(3))]).load_state_dict(theirs.state_dict())


def test_a_momentum_that_torch_has_not_begun_begins_with_the_gradient():
    """torch.optim.SGD saves no state for a parameter that had no gradient yet."""
    a, b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    theirs = torch.optim.SGD([a, b], lr=0.1, momentum=0.9, dampening=0.5)
    feed([a], 0)
    theirs.step()
    c, d = nn.Parameter(a.detach().clone()), nn.Parameter(b.detach().clone())
    ours = SGD([c, d], momentum=0.9)
    ours.load_state_dict(through_disk(theirs.state_dict()))
    train(theirs, [1, 2])
    train(ours, [1, 2])
    assert torch.allclose(a, c, rtol=1e-6) and torch.allclose(b, d, rtol=1e-6)


# Learning-rate schedulers.

SCHEDULERS = {
    "LambdaLR": lambda opt: lr_scheduler.LambdaLR(opt, lambda step: 0.9**step),
    "MultiplicativeLR": lambda opt: lr_scheduler.MultiplicativeLR(opt, lambda step: 0.95),
    "StepLR": lambda opt: lr_scheduler.StepLR(opt, 2),
    "MultiStepLR": lambda opt: lr_scheduler.MultiStepLR(opt, [2, 5]),
    "ConstantLR": lambda opt: lr_scheduler.ConstantLR(opt, total_iters=3),
    "LinearLR": lambda opt: lr_scheduler.LinearLR(opt, total_iters=6),
    "ExponentialLR": lambda opt: lr_scheduler.ExponentialLR(opt, 0.9),
    "PolynomialLR": lambda opt: lr_scheduler.PolynomialLR(opt, 8),
    "CosineAnnealingLR": lambda opt: lr_scheduler.CosineAnnealingLR(opt, 8),
    "CosineAnnealingWarmRestarts": lambda opt: lr_scheduler.CosineAnnealingWarmRestarts(opt, 3),
    "CyclicLR": lambda opt: lr_scheduler.CyclicLR(opt, 1e-4, 1e-2, step_size_up=3),
    "OneCycleLR": lambda opt: lr_scheduler.OneCycleLR(opt, 1e-2, total_steps=12),
    "ReduceLROnPlateau": lambda opt: lr_scheduler.ReduceLROnPlateau(opt, patience=1),
    "ChainedScheduler": lambda opt: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(opt, total_iters=2), lr_scheduler.ExponentialLR(opt, 0.9)]
    ),
    "SequentialLR": lambda opt: lr_scheduler.SequentialLR(
        opt,
        [lr_scheduler.LinearLR(opt, total_iters=3), lr_scheduler.CosineAnnealingLR(opt, 6)],
        milestones=[3],
    ),
    "SWALR": lambda opt: torch.optim.swa_utils.SWALR(opt, 1e-3, anneal_epochs=4),
}


def test_every_scheduler_of_torch_is_tried():
    defined = {
        name
        for name, value in vars(lr_scheduler).items()
        if isinstance(value, type) and issubclass(value, lr_scheduler.LRScheduler)
    }
    assert defined - {"LRScheduler", "_LRScheduler"} <= set(SCHEDULERS)


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize(
    ("rule", "lr"),
    [*((rule, 1e-2) for rule in RULES), ("adamw", torch.tensor(1e-2))],
    ids=[*RULES, "adamw-tensor"],
)
def test_schedulers_drive_ours_as_they_drive_torchs_and_resume(rule, name, lr):
    def step(opt, scheduler, number):
        train(opt, [number])
        scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
        return [float(group["lr"]) for group in opt.param_groups]

    def ours():
        opt = OPTIMIZERS[rule](parameters(), lr=copy.deepcopy(lr))
        return opt, SCHEDULERS[name](opt)

    theirs = torch.optim.SGD([constant(1.0, 2)], lr=copy.deepcopy(lr), momentum=0.9)
    opt, scheduler = ours()
    guide = SCHEDULERS[name](theirs)
    for number in range(5):
        assert step(opt, scheduler, number) == step(theirs, guide, number)
    assert type(opt.param_groups[0]["lr"]) is type(lr)

    other, other_scheduler = ours()
    with torch.no_grad():
        for p, q in zip(params_of(opt), params_of(other), strict=True):
            q.copy_(p)
    other_scheduler.load_state_dict(copy.deepcopy(scheduler.state_dict()))
    other.load_state_dict(through_disk(opt.state_dict()))
    for number in range(5, 10):
        assert step(opt, scheduler, number) == step(other, other_scheduler, number)
    assert_same_training(opt, other)


@pytest.mark.parametrize("rule", RULES)
def test_a_tensor_learning_rate_gives_the_bits_of_its_float(rule):
    lr = torch.tensor(1e-2)
    a = OPTIMIZERS[rule](parameters(), lr=lr)
    b = OPTIMIZERS[rule](parameters(), lr=lr.item())
    c = OPTIMIZERS[rule](parameters(), lr=lr.reshape(1))
    for opt in (a, b, c):
        train(opt, range(3))
    assert_same_training(a, b)
    assert_same_training(a, c)


def test_a_learning_rate_written_by_hand_counts_at_the_next_step():
    a, b = Lion([constant(1.0, 4)], lr=1e-3), Lion([constant(1.0, 4)], lr=torch.tensor(1e-3))
    train(a, [0])
    train(b, [0])
    a.param_groups[0]["lr"] = 0.0625
    b.param_groups[0]["lr"].fill_(0.0625)
    train(a, [1])
    train(b, [1])
    assert_same_training(a, b)
    assert (a.master_weight(params_of(a)[0]) - 1).abs().max() > 0.05


def test_state_dict_hooks_run_and_may_replace_what_is_loaded():
    opt = Adam([constant(1.0, 3)])
    train(opt, range(2))
    calls = []
    opt.register_state_dict_pre_hook(lambda o: calls.append("saving"))
    opt.register_state_dict_post_hook(lambda o, sd: {**sd, "extra": 1})
    saved = opt.state_dict()
    assert saved["extra"] == 1 and calls == ["saving"]

    def double_lr(o, sd):
        groups = [{**group, "lr": 2 * group["lr"]} for group in sd["param_groups"]]
        return {**sd, "param_groups": groups}

    opt.register_load_state_dict_pre_hook(double_lr)
    opt.register_load_state_dict_post_hook(lambda o: calls.append("loaded"))
    lr = opt.param_groups[0]["lr"]
    opt.load_state_dict(saved)
    assert calls == ["saving", "loaded"] and opt.param_groups[0]["lr"] == 2 * lr
    assert saved["param_groups"][0]["lr"] == lr


def test_integer_planes_survive_with_every_pattern():
    p = nn.Parameter(torch.arange(1 << 16).to(torch.int16).view(torch.bfloat16))
    opt = AdamW([p])
    opt.state[p]["remainder"].copy_(torch.arange(1 << 16).to(torch.int16))
    saved, (q,) = through_disk([opt.state_dict(), [p]])
    other = AdamW([q])
    other.load_state_dict(saved)
    assert torch.equal(other.state[q]["remainder"], opt.state[p]["remainder"])
    assert torch.equal(pattern(other.master_weight(q)), pattern(opt.master_weight(p)))

"""What users of ``torch.optim`` pass and do: each thing works as there, or is refused in words."""

import contextlib
import copy
import inspect
import math
from importlib import import_module
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import halfword
from halfword import SGD, Adam, AdamW, Lion, fp32_state_dict, load_fp32_state_dict
from halfword.backends import BACKENDS, triton
from halfword.formats import MASTER_WEIGHTS, MOMENTS
from halfword.rules import RULES
from helpers import (
    OPTIMIZERS,
    assert_same_snapshot,
    assert_same_training,
    constant,
    feed,
    parameters,
    require,
    same,
    snapshot,
    threads,
    train,
)

CLASSES = ("AdamW", "Adam", "SGD")
OTHER_DEFAULT_DTYPES = (torch.float64, torch.bfloat16, torch.float16)


@pytest.fixture(scope="module")
def torch_inputs():
    """torch's own test inputs; imported late, since that takes seconds."""
    pytest.importorskip("expecttest", reason="torch's testing module needs it")
    return import_module("torch.testing._internal.common_optimizers")


# torch's own test inputs.

REFUSED = {
    "amsgrad": "amsgrad=True: not supported; AdamW and Adam keep two moments",
    "capturable": f"capturable=True: {triton.unavailable()}",
}


@pytest.mark.parametrize("name", CLASSES)
def test_every_configuration_follows_torch_or_is_refused(name, torch_inputs, subtests):
    """Bound: after 20 steps every weight is within 4e-6 of torch's, relative or absolute."""
    listed = getattr(torch_inputs, f"optim_inputs_func_{name.lower()}")
    followed = 0
    # The list for CUDA adds configurations that need no device to be refused, MPS's a tensor lr.
    for device in ("cpu", "cuda", "mps"):
        for config in listed(device=device):
            with subtests.test(config.desc, device=device):
                refused = [text for key, text in REFUSED.items() if config.kwargs.get(key)]
                if refused:
                    with pytest.raises(ValueError, match="|".join(refused)):
                        getattr(halfword, name)(parameters(torch.float32), **config.kwargs)
                    continue
                ours, theirs = parameters(torch.float32), parameters(torch.float32)
                train(getattr(halfword, name)(ours, **copy.deepcopy(config.kwargs)), range(20))
                train(getattr(torch.optim, name)(theirs, **copy.deepcopy(config.kwargs)), range(20))
                for p, q in zip(ours, theirs, strict=True):
                    assert torch.allclose(p, q, rtol=4e-6, atol=4e-6)
                followed += 1
    assert followed >= 9


# By torch's description of the input: the error and the words that ours has for it.
ERRORS = {
    "invalid param type": (TypeError, "an iterable of Tensors or dicts"),
    "a param group cannot have duplicate parameters": (ValueError, "appears twice in one group"),
    "duplicate parameters should not occur across param groups either": (
        ValueError,
        "some parameters appear in more than one parameter group",
    ),
    "Tensor lr must be 1-element": (
        ValueError,
        r"lr has shape \(2,\): a tensor must hold one element",
    ),
    "all optimizer params should be with/without names": (ValueError, "names are missing"),
    "all optimizer param groups should be with/without names.": (
        ValueError,
        "cannot add param group with names",
    ),
    "beta1 should be between 0 and 1": (
        ValueError,
        r"betas\[0\]=1.0: must be at least 0 and below 1",
    ),
    "weight_decay should > 0": (ValueError, "weight_decay=-1: must be at least 0 and finite"),
    "momentum should be between 0 and 1": (
        ValueError,
        "momentum=-0.5: must be at least 0 and finite",
    ),
}
# Limits of torch's implementations that ours does not have: a tensor counts as its number.
ACCEPTED = {
    "lr as Tensor doesn't work with foreach & not capturable",
    "betas must be either both floats or both Tensors",
    r"betas\[0\] as a Tensor is not supported for capturable=False and foreach=True",
}


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
@pytest.mark.parametrize("name", CLASSES)
def test_every_error_input_of_torch_raises_or_works(name, torch_inputs, subtests):
    make = getattr(halfword, name)
    listed = getattr(torch_inputs, f"optim_error_inputs_func_{name.lower()}")
    for wrong in listed(device="cpu", dtype=torch.float32):
        config = wrong.optimizer_error_input
        with subtests.test(config.desc):
            params = parameters(torch.float32) if config.params is None else config.params
            if config.desc not in ACCEPTED:
                error, words = ERRORS[config.desc]
                with pytest.raises(error, match=words):
                    make(params, **config.kwargs)
                continue
            opt = make(params, **config.kwargs)
            numbers = {"lr": float(config.kwargs["lr"])}
            if "betas" in config.kwargs:
                numbers["betas"] = tuple(float(beta) for beta in config.kwargs["betas"])
            plain = make(parameters(torch.float32), **numbers)
            train(opt, range(3))
            train(plain, range(3))
            assert_same_training(opt, plain)


@pytest.mark.parametrize("name", CLASSES)
def test_signatures_begin_as_torchs(name):
    ours = inspect.signature(getattr(halfword, name)).parameters
    theirs = inspect.signature(getattr(torch.optim, name)).parameters
    positional = [p.name for p in theirs.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [p.name for p in ours.values() if p.kind is p.POSITIONAL_OR_KEYWORD] == positional
    for parameter in theirs.values():
        assert ours[parameter.name].default == parameter.default, parameter.name
        assert ours[parameter.name].kind == parameter.kind, parameter.name


@pytest.mark.parametrize("choice", [{"foreach": True}, {"foreach": False}, {"fused": True}, {}])
@pytest.mark.parametrize("rule", RULES)
def test_foreach_and_fused_choose_no_bits(rule, choice):
    opt, ref = OPTIMIZERS[rule](parameters(), **choice), OPTIMIZERS[rule](parameters())
    train(opt, range(3))
    train(ref, range(3))
    assert_same_training(opt, ref)


# Settings that cannot be honoured.


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"betas": (0.9,)}, "betas"),
        ({"betas": (0.9, 0.99, 0.999)}, "betas"),
        ({"betas": (0.9, math.nan)}, r"betas\[1\]=nan: must be at least 0 and below 1"),
        ({"eps": math.inf}, "eps=inf: must be at least 0 and finite"),
        ({"moments": ("fp32",)}, r"moments=\('fp32',\): adamw keeps 2 \(exp_avg, exp_avg_sq\)"),
        ({"moments": None}, "moments=None"),
        ({"master_weights": None}, "master_weights=None: use one of 'auto', 'split'"),
        ({"seed": 0.5}, "seed=0.5"),
        ({"seed": "a"}, "seed='a'"),
    ],
)
def test_a_setting_without_sense_is_refused_at_construction(settings, words):
    with pytest.raises(ValueError, match=words):
        AdamW([constant(1.0, 2)], **settings)


@pytest.mark.parametrize("settings", [{"momentum": 0.0}, {"momentum": 0.9, "dampening": 0.1}])
def test_nesterov_needs_momentum_and_no_dampening(settings):
    with pytest.raises(ValueError, match="nesterov=True: needs momentum > 0 and dampening=0"):
        SGD([constant(1.0, 2)], nesterov=True, **settings)


@pytest.mark.parametrize("option", ["amsgrad", "capturable", "differentiable"])
def test_an_option_switched_on_later_is_not_ignored_either(option):
    """In a group, in a loaded state dict, or in the groups at hand."""
    p, q = constant(1.0, 2), constant(1.0, 2)
    opt = AdamW([p])
    with pytest.raises(ValueError, match=f"{option}=True"):
        opt.add_param_group({"params": [q], option: True})
    opt.param_groups[0][option] = True
    feed([p], 0)
    with pytest.raises(ValueError, match=f"{option}=True"):
        opt.step()


@pytest.mark.parametrize("momentum", [0.5, 0.0])
def test_a_momentum_changed_in_training_is_followed_as_in_torch_or_refused_by_name(momentum):
    ours, theirs = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    before = 0.9 if momentum == 0.0 else 0.0
    opt, ref = SGD([ours], momentum=before), torch.optim.SGD([theirs], momentum=before)
    for number in range(6):
        if number == 3:
            opt.param_groups[0]["momentum"] = ref.param_groups[0]["momentum"] = momentum
        train(ref, [number])
        feed([ours], number)
        try:
            opt.step()
        except ValueError as refusal:
            assert "momentum" in str(refusal)
            return
    assert torch.allclose(ours, theirs, rtol=1e-6)
    again = SGD([nn.Parameter(ours.detach().clone())], momentum=momentum)
    again.load_state_dict(opt.state_dict())
    train(opt, [6])
    train(again, [6])
    assert_same_snapshot(
        [{"master": s["master"]} for s in snapshot(opt)],
        [{"master": s["master"]} for s in snapshot(again)],
    )


# Parameters of every kind.


OTHER_KINDS = {
    "meta": (
        lambda: torch.empty(3, device="meta"),
        "is on the meta device: materialize the model before making the optimizer",
    ),
    "sparse": (
        lambda: torch.eye(3).to_sparse(),
        "has layout torch.sparse_coo: only dense parameters are supported",
    ),
    "compressed": (
        lambda: torch.eye(4).to_sparse_csr(),
        "has layout torch.sparse_csr: only dense parameters are supported",
    ),
    **{
        str(dtype): (
            lambda dtype=dtype: torch.zeros(3, dtype=dtype),
            f"has dtype {str(dtype)[6:]}: use float32, bfloat16 or float16",
        )
        for dtype in (torch.complex64, torch.float64, torch.int64, torch.float8_e4m3fn)
    },
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_a_parameter_of_another_kind_is_refused_by_name(kind):
    make, words = OTHER_KINDS[kind]
    p = nn.Parameter(make(), requires_grad=kind not in ("torch.int64", "torch.complex64"))
    good = constant(1.0, 2)
    with pytest.raises(ValueError, match=f"parameter 1 {words}"):
        AdamW([good, p])
    with pytest.raises(ValueError, match=f"parameter 'layer.weight' {words}"):
        AdamW([("layer.weight", p)])
    opt = AdamW([good])
    with pytest.raises(ValueError, match=f"parameter 1 {words}"):
        opt.add_param_group({"params": [p]})
    assert len(opt.param_groups) == 1 and set(opt.state) == {good}
    assert set(opt.state_dict()["state"]) == {0}


@pytest.mark.parametrize("on_nonfinite", ["propagate", "skip", "raise"])
@pytest.mark.parametrize("clipped", [False, True])
def test_a_sparse_gradient_is_refused_and_nothing_is_written(on_nonfinite, clipped):
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2))
    opt = AdamW(model.named_parameters(), on_nonfinite=on_nonfinite)
    before = snapshot(opt)
    model(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(
        ValueError,
        match="parameter '0.weight' has a sparse gradient: make it dense, nn.Embedding by sparse=F",
    ):
        if clipped:
            opt.clip_grad_norm(1.0)
        opt.step()
    assert_same_snapshot(before, snapshot(opt))


def test_a_complex_gradient_is_refused_and_nothing_is_written():
    """Its imaginary part may not vanish in silence."""
    p = constant(1.0, 3)
    opt = AdamW([p])
    before = snapshot(opt)
    p.grad_dtype = None
    p.grad = torch.ones(3, dtype=torch.complex64)
    with pytest.raises(ValueError, match="parameter 0 has a .*complex64"):
        opt.step()
    assert_same_snapshot(before, snapshot(opt))


@pytest.mark.parametrize("setting", [s for s in MASTER_WEIGHTS[torch.bfloat16] if "bf16" in s])
def test_fp16_parameters_refuse_what_was_made_for_bf16(setting):
    words = f"master_weights='{setting}': parameter 0 is float16, which takes 'auto' or 'fp32'"
    with pytest.raises(ValueError, match=words):
        AdamW([constant(1.0, 2, dtype=torch.float16)], master_weights=setting)


@pytest.mark.parametrize("rule", RULES)
def test_a_parameter_cast_before_the_first_step_is_followed_everywhere(rule):
    """``model.bfloat16()`` after the optimizer was made; every public method comes first once."""
    used = {
        "master_weight": lambda model, opt: opt.master_weight(model.weight),
        "refresh": lambda model, opt: opt.refresh_master_weights(),
        "memory": lambda model, opt: opt.memory(),
        "fp32_state_dict": fp32_state_dict,
        "load": lambda model, opt: load_fp32_state_dict(
            model, opt, {k: v.float() for k, v in model.state_dict().items()}
        ),
        "state_dict": lambda model, opt: opt.load_state_dict(opt.state_dict()),
    }
    for first, dtype in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)):
        for name, use in used.items():
            torch.manual_seed(0)
            model = nn.Linear(3, 2).to(first)
            opt = OPTIMIZERS[rule](model.parameters())
            model.to(dtype)
            fresh = nn.Linear(3, 2).to(dtype)
            fresh.load_state_dict(model.state_dict())
            ref = OPTIMIZERS[rule](fresh.parameters())
            use(model, opt)
            train(opt, range(2))
            train(ref, range(2))
            assert_same_snapshot(snapshot(ref), snapshot(opt))
            assert opt.memory() == ref.memory(), name


def test_a_model_with_extra_state_has_an_fp32_state_dict():
    """Layers of Transformer Engine keep such a state, which is no tensor of the optimizer."""

    class Layer(nn.Linear):
        kept = None

        def get_extra_state(self):
            return {"scales": [1.0]}

        def set_extra_state(self, state):
            self.kept = state

    model = Layer(2, 2).bfloat16()
    opt = AdamW(model.parameters())
    state = fp32_state_dict(model, opt)
    assert state["_extra_state"] == {"scales": [1.0]}
    load_fp32_state_dict(model, opt, state)
    assert same(opt.master_weight(model.weight), state["weight"])


def test_parameters_may_come_in_every_way_torch_takes_them():
    def model():
        torch.manual_seed(0)
        return nn.Linear(3, 2).bfloat16()

    ways = [
        lambda m: m.parameters(),
        lambda m: list(m.parameters()),
        lambda m: tuple(m.parameters()),
        lambda m: {"a": m.weight, "b": m.bias}.values(),
        lambda m: [{"params": m.weight}, {"params": [m.bias]}],
        lambda m: [{"params": m.parameters()}],
        lambda m: m.named_parameters(),
        lambda m: [{"params": m.named_parameters()}],
        lambda m: dict(m.named_parameters()).items(),
    ]
    ends = []
    for way in ways:
        net = model()
        opt = AdamW(way(net), lr=1e-2)
        train(opt, range(2))
        ends.append(snapshot(opt))
    for end in ends[1:]:
        assert_same_snapshot(ends[0], end)
    with pytest.raises(ValueError, match="empty parameter list"):
        AdamW([])
    with pytest.raises(ValueError, match="can't optimize a non-leaf Tensor"):
        AdamW([model().weight * 2])


def test_labels_are_names_where_given_and_positions_over_all_groups_else():
    a, b = constant(1.0, 2), constant(1.0, 2)
    opt = AdamW([{"params": [a]}, {"params": [b]}], on_nonfinite="raise")
    assert list(opt.parameters().values()) == ["parameter 0", "parameter 1"]
    named = AdamW([("x.weight", a), ("x.bias", b)])
    assert list(named.parameters().values()) == ["parameter 'x.weight'", "parameter 'x.bias'"]


# Groups.


def test_groups_added_later_have_formats_of_their_own():
    a, b, c = constant(1.0, 4), constant(1.0, 4), constant(1.0, 4, dtype=torch.float32)
    opt = AdamW([a], lr=1e-2)
    train(opt, range(3))
    opt.add_param_group({"params": b, "master_weights": "split24", "moments": ("bf16", "bf16-sr")})
    opt.add_param_group({"params": [c], "lr": 1e-3, "moments": "bf16"})
    assert set(opt.state[b]) == {"step", "remainder8", "exp_avg_bf16", "exp_avg_sq_bf16"}
    alone = [
        AdamW([constant(1.0, 4)], lr=1e-2),
        AdamW([constant(1.0, 4, dtype=torch.float32)], lr=1e-3, moments="bf16"),
    ]
    train(alone[0], range(3))
    train(opt, [3])
    for ref, p, index in zip(alone, (a, c), (0, 2), strict=True):
        ref.param_groups[0]["params"][0].grad = p.grad.clone()
        ref.step()
        assert_same_snapshot(snapshot(ref), snapshot(opt)[index : index + 1])
    assert [opt.state[p]["step"].item() for p in (a, b, c)] == [4, 1, 1]
    with pytest.raises(ValueError, match="appear in more than one parameter group"):
        opt.add_param_group({"params": [a]})


@pytest.mark.parametrize(
    "wrong",
    [
        {"moments": "fp8"},
        {"master_weights": "int8"},
        {"lr": -1.0},
        {"betas": (1.0, 0.9)},
        {"dtype": torch.float64},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_a_refused_group_leaves_the_optimizer_as_it_was(wrong):
    p = constant(1.0, 2)
    opt = AdamW([p])
    train(opt, range(2))
    saved = copy.deepcopy(opt.state_dict())
    q = constant(1.0, 2, dtype=wrong.pop("dtype", torch.bfloat16))
    with pytest.raises(ValueError):
        opt.add_param_group({"params": [q], **wrong})
    assert opt.state_dict()["param_groups"] == saved["param_groups"]
    assert set(opt.state) == {p}
    train(opt, [2])


def test_noise_of_positions_counts_over_all_groups():
    """Two groups of one parameter each round as one group of two."""

    def run(grouped):
        params = [constant(1.0, 500), constant(1.0, 500)]
        groups = [{"params": [p]} for p in params] if grouped else params
        opt = SGD(groups, lr=1.0, master_weights="bf16-sr")
        train(opt, range(2))
        return snapshot(opt)

    assert_same_snapshot(run(grouped=False), run(grouped=True))


# The step and what goes around it.


@pytest.mark.parametrize("rule", RULES)
def test_a_closure_is_evaluated_once_with_gradients_on(rule):
    p, ref = constant(1.0, 4), constant(1.0, 4)
    opt, plain = OPTIMIZERS[rule]([p]), OPTIMIZERS[rule]([ref])

    def closure():
        assert torch.is_grad_enabled()
        calls.append(None)
        opt.zero_grad()
        loss = p.float().square().sum()
        loss.backward()
        opt.clip_grad_norm(0.5)
        return loss

    calls = []
    with torch.no_grad():
        loss = opt.step(closure)
    assert loss.item() == 4.0 and len(calls) == 1
    ref.float().square().sum().backward()
    plain.clip_grad_norm(0.5)
    assert plain.step() is None
    assert_same_training(opt, plain)


def test_step_hooks_run_around_every_step_and_may_be_removed():
    p = constant(1.0, 2)
    opt = AdamW([p])
    seen = []
    handles = [
        opt.register_step_pre_hook(lambda o, args, kwargs: seen.append(("pre", p.item_sum()))),
        opt.register_step_post_hook(lambda o, args, kwargs: seen.append(("post", p.item_sum()))),
        register_optimizer_step_pre_hook(lambda o, args, kwargs: seen.append("global pre")),
        register_optimizer_step_post_hook(lambda o, args, kwargs: seen.append("global post")),
    ]
    p.item_sum = lambda: p.detach().float().sum().item()
    p.grad = torch.ones_like(p)
    opt.param_groups[0]["lr"] = 0.25
    opt.step()
    kinds = [entry if isinstance(entry, str) else entry[0] for entry in seen]
    assert kinds == ["global pre", "pre", "post", "global post"]
    assert seen[1][1] == 2.0 and seen[2][1] < 2.0
    for handle in handles:
        handle.remove()
    opt.step()
    assert len(seen) == 4


def test_a_pre_hook_may_hand_over_a_closure():
    p = constant(1.0, 2)
    opt = AdamW([p])
    opt.register_step_pre_hook(lambda o, args, kwargs: ((args[0], lambda: 7.0), kwargs))
    assert opt.step() == 7.0


def test_autograd_notices_a_step_between_forward_and_backward():
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        p = constant(1.0, 4, dtype=dtype)
        opt = AdamW([p])
        loss = p.square().sum()
        p.grad = torch.ones_like(p)
        version = p._version
        opt.step()
        assert p._version > version
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_skipped_step_lets_the_backward_pass_go_on():
    p = constant(1.0, 4)
    opt = AdamW([p], on_nonfinite="skip")
    loss = p.square().sum()
    p.grad = torch.full_like(p, math.inf)
    opt.step()
    loss.backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", RULES)
def test_a_grad_scaler_scales_skips_and_unscales(rule, dtype):
    """Powers of two go in and out exactly, so the bits are those without a scaler."""
    p, ref = constant(1.0, 6, dtype=dtype), constant(1.0, 6, dtype=dtype)
    opt, plain = OPTIMIZERS[rule]([p]), OPTIMIZERS[rule]([ref])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    weights = torch.linspace(-1, 1, 6)
    for number in range(4):
        opt.zero_grad()
        before = snapshot(opt)
        overflow = number == 2
        factor = math.inf if overflow else 1.0
        scaler.scale((p.float() * weights * factor).sum()).backward()
        if number == 3:
            scaler.unscale_(opt)
            opt.clip_grad_norm(0.25)
        scaler.step(opt)
        scaler.update()
        if overflow:
            assert_same_snapshot(before, snapshot(opt))
            assert scaler.get_scale() == 2.0**9
            continue
        plain.zero_grad()
        (ref.float() * weights).sum().backward()
        if number == 3:
            plain.clip_grad_norm(0.25)
        plain.step()
    assert_same_training(opt, plain)


@pytest.mark.parametrize("rule", RULES)
def test_torchs_own_clipping_works_too(rule):
    opt, ref = OPTIMIZERS[rule](parameters()), OPTIMIZERS[rule](parameters())
    params, others = opt.param_groups[0]["params"], ref.param_groups[0]["params"]
    feed(params, 0)
    feed(others, 0)
    torch.nn.utils.clip_grad_norm_(params, 0.5)
    for p, q in zip(params, others, strict=True):
        q.grad = p.grad.clone()
    opt.step()
    ref.step()
    assert_same_training(opt, ref)


@pytest.mark.parametrize("clear", [lambda o: o.zero_grad(), lambda o: o.zero_grad(False)])
def test_zero_grad_forgets_gradients_and_coefficients(clear):
    p = constant(1.0, 2)
    opt = AdamW([p])
    feed([p], 0)
    opt.clip_grad_norm(1e-3)
    clear(opt)
    assert p.grad is None or not p.grad.any()
    ref = AdamW([constant(1.0, 2)])
    if p.grad is not None:
        train(ref, [])
        ref.param_groups[0]["params"][0].grad = torch.zeros_like(p)
        ref.step()
        opt.step()
    train(opt, [1])
    train(ref, [1])
    assert_same_training(opt, ref)


@pytest.mark.parametrize("rule", RULES)
def test_gradients_are_read_and_never_written(rule):
    opt = OPTIMIZERS[rule](parameters(), maximize=True)
    params = opt.param_groups[0]["params"]
    feed(params, 0)
    before = [(p.grad, p.grad.clone()) for p in params]
    opt.clip_grad_norm(0.1)
    opt.step()
    for p, (gradient, kept) in zip(params, before, strict=True):
        assert p.grad is gradient and same(gradient, kept)


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


AMBIENT = {
    "one thread": lambda: threads(1),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "no gradients": torch.no_grad,
    **{f"default {dtype}": lambda d=dtype: default_dtype(d) for dtype in OTHER_DEFAULT_DTYPES},
}


@pytest.mark.parametrize("ambient", AMBIENT)
@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("rule", RULES)
def test_what_is_set_around_a_step_changes_no_bits(rule, moments, ambient):
    def run():
        opt = OPTIMIZERS[rule](parameters(), master_weights="bf16-sr", moments=moments)
        for step in range(2):
            feed(opt.param_groups[0]["params"], step)
            opt.clip_grad_norm(1.0)
            opt.step()
        return snapshot(opt)

    ref = run()
    with AMBIENT[ambient]():
        assert_same_snapshot(ref, run())


@pytest.mark.parametrize("backend", BACKENDS)
def test_threads_do_not_change_the_bits_of_a_large_parameter(backend):
    require(backend)

    def run():
        p = nn.Parameter(torch.linspace(-1, 1, 70_000).bfloat16())
        p.grad = torch.linspace(1, -2, 70_000).bfloat16()
        opt = AdamW([p], moments="bf16-sr", backend=backend)
        opt.step()
        return [p, *opt.state[p].values()]

    with threads(1):
        single = run()
    with threads(2):
        double = run()
    assert all(same(a, b) for a, b in zip(single, double, strict=True))


@pytest.mark.parametrize("policy", ["propagate", "skip", "raise"])
def test_finite_gradients_give_the_same_bits_under_every_policy(policy):
    opt, ref = Lion(parameters(), on_nonfinite=policy), Lion(parameters())
    train(opt, range(3))
    train(ref, range(3))
    assert_same_training(opt, ref)
    assert not opt.step_was_skipped


def test_a_scheduler_can_be_held_on_a_skipped_step():
    p = constant(1.0, 2)
    opt = Adam([p], lr=1.0, on_nonfinite="skip")
    scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)
    for gradient in (1.0, math.nan, 1.0):
        p.grad = torch.full_like(p, gradient)
        opt.step()
        if not opt.step_was_skipped:
            scheduler.step()
    assert opt.param_groups[0]["lr"] == 0.25


def test_the_logger_is_the_packages_own(monkeypatch):
    """Applications silence or route it by name."""
    logger = Mock()
    monkeypatch.setattr("halfword.clip.logger", logger)
    p = constant(1.0, 2)
    opt = AdamW([("w", p)], on_nonfinite="skip")
    p.grad = torch.full_like(p, math.nan)
    opt.step()
    (call,) = logger.warning.call_args_list
    assert call.args[0] % call.args[1:] == (
        "step skipped: parameter 'w' has a gradient that is not finite"
    )


def test_an_embedding_row_without_gradient_decays_and_keeps_clear_of_denormals():
    """Moments below the smallest normal number become zero instead of slowing every step."""
    p = constant(1.0, 4, dtype=torch.float32)
    opt = AdamW([p], betas=(0.5, 0.5), lr=0.0)
    p.grad = torch.full_like(p, 1e-15)
    for _ in range(300):
        opt.step()
        p.grad = torch.zeros_like(p)
        for slot in ("exp_avg", "exp_avg_sq"):
            moment = opt.state[p][slot]
            assert ((moment == 0) | (moment >= 2.0**-126)).all()
    assert not opt.state[p]["exp_avg"].any() and not opt.state[p]["exp_avg_sq"].any()

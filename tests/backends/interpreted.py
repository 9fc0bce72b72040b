"""The Triton backend in Triton's interpreter, bit for bit against the reference.

Run by test_triton.py in a process of its own, with TRITON_INTERPRET=1: Triton reads the variable
when it is imported. Tiles are small here, for the interpreter takes the same time for any.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from bits import SPECIAL
from halfword import Adam, AdamW, Lion, noise
from halfword.backends import Clock, reference, triton, triton_batch, triton_kernels
from halfword.backends.triton_clock import ADDRESS, shape_of
from halfword.backends.triton_kernels import clock_kernel
from halfword.formats import FORMATS
from halfword.ops import sign, sqrt, where
from halfword.rules import RULES, Rule, Slot
from halfword.shards import Place
from helpers import OPTIMIZERS, assert_same_training, feed, parameters, same
from works import assert_same_planes, combinations, copies, make_works, name_of_formats

TILE = 128
SIZES = [
    *((7, torch.bfloat16), (TILE + 3, torch.bfloat16), (0, torch.bfloat16)),
    *((TILE, torch.float32), (5, torch.float16)),
]
WHOLE_BLOCKS = [
    *((64, torch.bfloat16), (TILE + 64, torch.bfloat16), (0, torch.bfloat16)),
    *((TILE, torch.float32), (64, torch.float16)),
]


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    monkeypatch.setattr(triton_batch, "TILE", TILE)
    monkeypatch.setattr(triton_kernels, "TILE", TILE)


@pytest.fixture(autouse=True, scope="module")
def _patch_once():
    """Only a launch patches Triton's language: each call inside would too, for half of the time."""
    from triton.runtime.interpreter import InterpretedFunction

    patching = InterpretedFunction.__call__

    def call(function, *args, **named):
        of_triton = function.fn.__module__.startswith("triton.")
        return (
            patching(function, *args, **named) if of_triton else function.rewrite()(*args, **named)
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpretedFunction, "__call__", call)
        yield


@pytest.mark.parametrize(
    ("rule", "weight", "slots"),
    combinations(),
    ids=name_of_formats,
)
def test_every_combination_has_the_bits_of_the_reference(rule, weight, slots):
    in_blocks = any(format.block > 1 for format in slots)
    expected = make_works(rule, weight, slots, WHOLE_BLOCKS if in_blocks else SIZES)
    found = copies(expected)
    assert all(map(triton.combination, found))
    reference.step(expected)
    triton.step(found)
    assert_same_planes(expected, found)


def stochastic_work(count: int) -> list:
    formats = FORMATS["split"], (FORMATS["bf16-sr"], FORMATS["fp32"])
    return make_works("adamw", *formats, [(count, torch.bfloat16)])


@pytest.mark.parametrize("start", [1, TILE, 2**31, 2**32 - 100, 2**33 - TILE, 2**40 + 3])
def test_noise_follows_the_64_bit_index(start):
    (work,) = make_works("sgd", FORMATS["bf16-sr"], (), [(3 * TILE, torch.float32)])
    weights, x = work.weight.planes[0], work.weight.format.decode(work.weight.planes)
    x, _ = work.rule.update(x, work.gradient * work.gradient_scale, (), work.scalars)
    bits = noise.bits(noise.key(work.weight.stream, work.step), start, 3 * TILE)
    (expected,) = work.weight.format.encode(x, bits)
    triton.step([replace(work, weight=replace(work.weight, place=Place(start)))])
    assert same(weights, expected)


@pytest.mark.parametrize("plane", range(4))
def test_a_plane_may_stand_at_any_address(plane):
    expected = stochastic_work(2 * TILE)
    (moved,) = copies(expected)
    stored = [moved.weight, *moved.slots]
    place = max(plane - 1, 0)
    planes = list(stored[place].planes)
    planes[plane == 1] = torch.cat([planes[plane == 1][:1], planes[plane == 1]])[1:]
    assert planes[plane == 1].data_ptr() % 16
    stored[place] = replace(stored[place], planes=tuple(planes))
    moved = replace(moved, weight=stored[0], slots=tuple(stored[1:]))
    reference.step(expected)
    triton.step([moved])
    assert_same_planes(expected, [moved])


def test_tables_are_sent_again_only_when_they_change():
    work, other = stochastic_work(TILE + 1) + stochastic_work(TILE)
    names = ("rows", "scalars", "full", "rest")

    def sent_by(*works):
        triton.step(works)
        (batch,) = works[0].kept["triton"].batches
        return {name: getattr(batch._tables, name)._tensor for name in names}

    def changed(before, after):
        return {name for name in names if before[name] is not after[name]}

    first = sent_by(work, other)
    second = sent_by(replace(work, scalars=tuple(2 * s for s in work.scalars)), other)
    assert changed(first, second) == {"scalars"}
    third = sent_by(replace(work, gradient=work.gradient.clone(), step=2), other)
    assert changed(second, third) == {"scalars", "rows"}
    fourth = sent_by(
        replace(work, gradient=torch.cat([work.gradient[:1], work.gradient])[1:]), other
    )
    assert changed(third, fourth) == set(names), "another alignment is another layout"


@pytest.mark.parametrize("rule", RULES)
def test_training_has_the_bits_of_the_reference(rule):
    ends = []
    for backend in ("triton", "reference"):
        params = [*parameters(), *parameters(torch.float32), *parameters(torch.float16)]
        opt = OPTIMIZERS[rule](params, backend=backend, seed=-3)
        for step in range(3):
            feed(params, step)
            if step == 1:
                params[0].data = params[0].data.clone()
            opt.clip_grad_norm(0.5)
            opt.step()
        ends.append(opt)
    assert_same_training(*ends)


def test_a_step_moves_the_version_counters_of_what_it_writes():
    p = torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    opt = AdamW([p], backend="triton")
    p.grad = torch.ones_like(p)
    written = [p, *(state for key, state in opt.state[p].items() if key != "step")]
    before = [tensor._version for tensor in written]
    opt.step()
    assert all(t._version > v for t, v in zip(written, before, strict=True))
    assert p.grad._version == 0


def contiguous_parameters(dtype=torch.bfloat16):
    return [p for p in parameters(dtype) if p.is_contiguous()]


CAPTURED = {"adamw": AdamW, "adam": Adam, "lion": Lion}


@pytest.mark.parametrize("rule", CAPTURED)
def test_a_step_that_may_be_captured_has_the_bits_of_one_that_may_not(rule):
    ends = []
    for captured in (True, False):
        params = [*contiguous_parameters(), *contiguous_parameters(torch.float32)]
        groups = [{"params": params[:3]}, {"params": params[3:], "lr": 1e-3, "maximize": True}]
        opt = CAPTURED[rule](
            groups,
            lr=torch.tensor(3e-3, dtype=torch.float64),
            weight_decay=0.1,
            moments="bf16-sr",
            backend="triton" if captured else "reference",
            capturable=captured,
        )
        for step in range(4):
            feed(params, step)
            opt.param_groups[0]["lr"].mul_(0.7)
            opt.clip_grad_norm(0.5)
            if step == 2:
                params[1].grad = None  # each parameter counts its own steps
            opt.step()
        ends.append(opt)
    assert_same_training(*ends)


def test_a_step_that_may_be_captured_skips_by_itself():
    ends = []
    for captured in (True, False):
        params = contiguous_parameters()
        backend = "triton" if captured else "reference"
        opt = AdamW(params, backend=backend, capturable=captured, on_nonfinite="skip")
        for step in range(4):
            feed(params, step)
            if step in (1, 3):
                params[0].grad[2, 1] = torch.inf if step == 1 else torch.nan
            opt.step()
            assert opt.step_was_skipped == (step in (1, 3))
        ends.append(opt)
        assert [opt.state[p]["step"].item() for p in params] == [2.0] * len(params)
    assert_same_training(*ends)


def test_a_learning_rate_that_the_device_cannot_read_is_refused():
    (p, *_) = params = contiguous_parameters()
    opt = AdamW(params, lr=torch.tensor(1e-3), backend="triton", capturable=True)
    assert opt.param_groups[0]["lr"].dtype == torch.float64
    opt.param_groups[0]["lr"] = torch.tensor(1e-3)
    feed(params, 0)
    before = p.detach().clone()
    with pytest.raises(ValueError, match="lr is a float32 tensor on cpu, capturable=True: it must"):
        opt.step()
    assert torch.equal(p, before) and opt.state[p]["step"] == 0


def test_a_state_that_is_loaded_is_captured_again():
    params = contiguous_parameters()
    opt = AdamW(params, lr=torch.tensor(1e-3), backend="triton", capturable=True)
    other = AdamW(contiguous_parameters(), lr=torch.tensor(2e-3), backend="reference")
    for loaded in (other.state_dict(), opt.state_dict()):
        opt.load_state_dict(loaded)
        assert opt.param_groups[0]["lr"].dtype == torch.float64
        feed(params, 0)
        opt.step()


SETTINGS = [
    {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01},
    {"lr": 7e-5, "betas": (0.97, 0.99999), "eps": 1e-15, "weight_decay": 0.3},
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_scalars_of_the_device_are_those_of_the_host_for_100_000_steps(settings):
    assert_same_scalars("adamw", settings, 100_000)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("nesterov", [True, False])
def test_scalars_of_the_device_are_those_of_the_host_for_every_rule(rule, decoupled, nesterov):
    flags = {"decoupled_weight_decay": decoupled, "nesterov": nesterov}
    assert_same_scalars(rule, SETTINGS[0] | {"momentum": 0.9, "dampening": 0.1} | flags, 50)


def assert_same_scalars(rule, settings, steps):
    """Advance one clock from each step on, and compare what it leaves with what Python computes."""
    block = 1 << 15
    lr, scale = (torch.tensor(x, dtype=torch.float64) for x in (settings["lr"], -0.3))
    settings = settings | {"lr": lr}
    counters = torch.arange(steps, dtype=torch.float32)
    kernel = clock_kernel(RULES[rule], shape_of(settings), ADDRESS, False)
    words = torch.tensor(kernel.words(Clock(counters[0], settings, scale)))
    addresses = counters.data_ptr() + 4 * torch.arange(steps)
    rows = torch.cat([addresses[:, None], words.expand(steps, -1)], dim=1)
    found = torch.empty(steps, kernel.num_scalars, dtype=torch.float64)
    kernel.advance[(-(-steps // block),)](rows, found, steps, BLOCK=block)
    assert torch.equal(counters, torch.arange(1, steps + 1, dtype=torch.float32))
    on_host = settings | {"lr": lr.item()}
    expected = [(-0.3, *RULES[rule].scalars(on_host, step)) for step in range(1, steps + 1)]
    expected = torch.tensor(expected, dtype=torch.float64).float()
    assert torch.equal(found[:, :-1], expected.double())
    assert torch.equal(found[:, -1], counters.double())


def _every_word(x, g, slots, scalars):
    a, b, c = scalars
    (m,) = slots
    third = (a + b) / 3 - 0.1 * b  # in float64 until it meets a tile
    m = where(g > third, third * sqrt(g), -m)
    x = where(a > b, x - m, where(m <= x, sign(x), 0.5))
    return x / c + where(a < 1.0, b, third) - (1 - x), (m,)


@pytest.mark.parametrize("scalars", [(0.3, 0.7, 1.1), (2.0, 1.0, -3.0)])
def test_a_printed_rule_computes_what_the_python_function_does(scalars):
    rule = Rule("every_word", (Slot("m", True),), lambda group, step: (), _every_word)
    (work,) = make_works("lion", FORMATS["fp32"], (FORMATS["fp32"],), [(TILE + 9, torch.float32)])
    values: list[Tensor] = [SPECIAL.repeat(7)[: TILE + 9].clone(), work.slots[0].planes[0]]
    weight = replace(work.weight, planes=(values[0],))
    expected = replace(work, rule=rule, weight=weight, scalars=scalars, gradient_scale=1.0)
    (found,) = copies([expected])
    reference.step([expected])
    triton.step([found])
    assert_same_planes([expected], [found])

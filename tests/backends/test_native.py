"""The compiled backend against the reference, bit for bit, and what it does where it cannot run."""

import logging
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from halfword import AdamW, noise
from halfword.backends import Work, choose, native, reference
from halfword.formats import FORMATS, Format
from halfword.shards import Place
from helpers import same
from works import (
    GRADIENTS,
    assert_same_planes,
    combinations,
    copies,
    make_works,
    name_of_formats,
)

COUNTS = (0, 1, 7, 255, 256, 257, 3000)
WHOLE_BLOCKS = (0, 64, 192, 256, 320, 3008)


@pytest.fixture(autouse=True)
def _needs_a_compiler():
    if reason := native.unavailable():
        pytest.skip(reason)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def without_compiler(monkeypatch, tmp_path):
    """No compiler on the path, and nothing compiled in the cache."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native.library.cache_clear()
    reference.say_once.cache_clear()
    yield
    native.library.cache_clear()


def works(
    rule: str, weight: Format, slots: tuple[Format, ...], counts: tuple[int, ...] | None = None
) -> list[Work]:
    """Return a work of each size and gradient dtype, with any bits in it."""
    if counts is None:
        counts = WHOLE_BLOCKS if any(format.block > 1 for format in slots) else COUNTS
    return make_works(rule, weight, slots, product(counts, GRADIENTS))


@pytest.mark.parametrize(
    ("rule", "weight", "slots"),
    combinations(),
    ids=name_of_formats,
)
def test_every_combination_has_the_bits_of_the_reference(rule, weight, slots):
    expected = works(rule, weight, slots)
    found = copies(expected)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        assert all(native.library().places(work) for work in found)
        reference.step(expected)
        native.step(found)
        assert_same_planes(expected, found)


def large_work(count: int = 200_001) -> list[Work]:
    formats = FORMATS["split"], (FORMATS["bf16-sr"], FORMATS["fp32"])
    return works("adamw", *formats, counts=(count,))[:1]


@pytest.mark.parametrize("openmp", [True, False])
def test_the_number_of_threads_changes_nothing(openmp, monkeypatch):
    if not openmp:
        monkeypatch.setattr(native.library(), "_openmp", (None, None))
    expected = large_work()
    torch.set_num_threads(1)
    alone = copies(expected)
    native.step(alone)
    reference.step(expected)
    assert_same_planes(expected, alone)
    for threads in (2, 3, 8):
        together = large_work()
        torch.set_num_threads(threads)
        native.step(together)
        assert_same_planes(alone, together)


def test_flushing_of_subnormal_numbers_by_torch_changes_nothing():
    expected, found = large_work(3000), large_work(3000)
    reference.step(expected)
    torch.set_flush_denormal(True)
    try:
        native.step(found)
        assert torch.tensor(1e-40) * 2 == 0, "the calling thread keeps its own setting"
    finally:
        torch.set_flush_denormal(False)
    assert_same_planes(expected, found)


@pytest.mark.parametrize("start", [1, 255, 2**31, 2**32 - 100, 2**40 + 3])
def test_noise_follows_the_64_bit_index(start):
    (work,) = works("sgd", FORMATS["bf16-sr"], (), counts=(1000,))[:1]
    weights, x = work.weight.planes[0], work.weight.format.decode(work.weight.planes)
    x, _ = work.rule.update(x, work.gradient.float() * work.gradient_scale, (), work.scalars)
    bits = noise.bits(noise.key(work.weight.stream, work.step), start, 1000)
    (expected,) = work.weight.format.encode(x, bits)
    native.step([replace(work, weight=replace(work.weight, place=Place(start)))])
    assert same(weights, expected)


def test_planes_may_stand_at_any_address():
    expected = large_work(1000)
    found = []
    for work in expected:
        planes = [torch.cat([p[:1], p]) for p in work.weight.planes]
        moved = tuple(plane[1:] for plane in planes)
        assert all(p.data_ptr() % 8 for p in moved)
        found.append(replace(copies([work])[0], weight=replace(work.weight, planes=moved)))
    reference.step(expected)
    native.step(found)
    assert_same_planes(expected, found)


def test_a_step_moves_the_version_counters_of_what_it_writes():
    p = torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    opt = AdamW([p], backend="native")
    p.grad = torch.ones_like(p)
    written = [p, *(state for key, state in opt.state[p].items() if key != "step")]
    before = [tensor._version for tensor in written]
    gradient_version = p.grad._version
    opt.step()
    assert all(t._version > v for t, v in zip(written, before, strict=True))
    assert p.grad._version == gradient_version


def _clone_data(p, opt):
    p.data = p.data.clone()


def _clone_data_of_state(p, opt):
    opt.state[p]["exp_avg"].data = opt.state[p]["exp_avg"].data.clone()


def _replace_state(p, opt):
    opt.state[p]["exp_avg_sq"] = opt.state[p]["exp_avg_sq"].clone()


def _transpose(p, opt):
    p.data = p.data.t()


def _load(p, opt):
    opt.load_state_dict(opt.state_dict())


def _more_groups(p, opt):
    opt.add_param_group({"params": [torch.nn.Parameter(torch.ones(3).bfloat16())]})


@pytest.mark.parametrize(
    "change",
    [_clone_data, _clone_data_of_state, _replace_state, _transpose, _load, _more_groups],
)
def test_what_changed_between_steps_is_seen(change):
    """What is kept from step to step may not outlive a change."""
    ends = []
    for backend in ("native", "reference"):
        torch.manual_seed(0)
        p = torch.nn.Parameter(torch.randn(16, 16).bfloat16())
        opt = AdamW([p], backend=backend)
        old = p.data
        for step in range(3):
            p.grad = torch.randn(16, 16).bfloat16()
            opt.step()
            if step == 0:
                change(p, opt)
                before = old.clone()
        if change is _clone_data:
            assert torch.equal(old, before), "the tensor that was left behind is not written"
        ends.append([p.detach(), *opt.state[p].values()])
    assert all(same(a, b) for a, b in zip(*ends, strict=True))


class Wrapped(Tensor):
    """A tensor of a class of its own, as parallel wrappers make them."""


@pytest.mark.parametrize("which", ["transposed", "wrapped", "float64 gradient"])
def test_what_it_cannot_take_is_left_to_the_reference_and_said_once(which, caplog):
    reference.say_once.cache_clear()
    expected = [
        replace(
            work,
            weight=replace(work.weight, planes=tuple(p.view(6, 5) for p in work.weight.planes)),
            slots=(),
            gradient=work.gradient.view(6, 5),
        )
        for work in works("sgd", FORMATS["split"], (), counts=(30,))[:2]
    ]
    found = copies(expected)
    if which == "transposed":
        found = [replace(work, gradient=work.gradient.t().contiguous().t()) for work in found]
    elif which == "wrapped":
        found = [replace(w, gradient=w.gradient.as_subclass(Wrapped)) for w in found]
    else:
        found = [replace(w, gradient=w.gradient.double()) for w in found]
        expected = [replace(w, gradient=w.gradient.double()) for w in expected]
    reference.step(expected)
    with caplog.at_level(logging.WARNING):
        native.step(found)
    assert_same_planes(expected, found)
    assert caplog.messages == [
        "halfword runs its slower reference backend: "
        "a gradient is not contiguous, or of a class or dtype of its own"
    ]


def test_without_a_compiler_the_reference_runs_and_says_so_once(without_compiler, caplog):
    p = torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    opt = AdamW([p])
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            p.grad = torch.ones_like(p)
            opt.step()
    assert opt.state[p]["step"] == 2
    assert caplog.messages == [
        "halfword runs its slower reference backend: no C++ compiler found; "
        "install g++ or clang++, or name one in CXX"
    ]


def test_without_a_compiler_asking_for_it_by_name_raises(without_compiler):
    with pytest.raises(ValueError) as error:
        choose("native")
    assert str(error.value) == (
        "backend='native': no C++ compiler found; install g++ or clang++, or name one in CXX; "
        "or use backend='auto'"
    )


def test_a_format_without_cpp_is_left_to_the_reference(monkeypatch, caplog):
    reference.say_once.cache_clear()
    library = native.library()
    monkeypatch.setattr(library, "_formats", {})
    monkeypatch.setattr(library, "_missing", {"split": "format 'split' has no C++ header"})
    (work,) = works("sgd", FORMATS["split"], (), counts=(30,))[:1]
    with caplog.at_level(logging.WARNING):
        assert library.places(work) is None
    assert caplog.messages == [
        "halfword runs its slower reference backend: format 'split' has no C++ header"
    ]


def test_a_rule_that_is_not_listed_is_left_to_the_reference():
    (work,) = works("sgd", FORMATS["split"], (), counts=(30,))[:1]
    work = replace(work, rule=replace(work.rule))
    assert native.library().places(work) is None

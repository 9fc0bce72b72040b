"""The Triton backend where there is no GPU: what is printed, what is refused, and its bits.

Its bits are tested in Triton's interpreter by interpreted.py, in a process of its own.
"""

import logging
import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from halfword import backends
from halfword.backends import choose, native, reference, triton, triton_kernels
from halfword.backends.triton_source import print_step
from halfword.formats import FORMATS
from halfword.rules import RULES
from works import assert_same_planes, copies, make_works

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")


@needs_triton
def test_all_bits_in_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    path = Path(__file__).with_name("interpreted.py")
    run = subprocess.run([*command, path], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-10_000:] + run.stderr[-2000:]


def test_what_is_printed_is_straight_line_code():
    assert print_step(RULES["sgd"], [FORMATS["bf16-sr"]], torch.float32) == EXPECTED


EXPECTED = '''"""sgd on bf16-sr with torch.float32 gradients, printed by halfword."""

import triton
import triton.language as tl

from halfword.backends.kernels import noise, plain, stochastic, words


@triton.jit
def full(rows, all_scalars, owners, TILE: tl.constexpr):
    program = tl.program_id(0)
    row = rows + tl.load(owners + program).to(tl.int64) * 8
    start = (program - tl.load(row + 3)) * TILE
    scalars = all_scalars + tl.load(row + 2) * 5
    step = tl.load(scalars + 4)
    each = tl.arange(0, TILE)
    x_at0 = tl.multiple_of(tl.load(row + 6).to(tl.pointer_type(tl.int16)) + start + each, 16)
    x = stochastic.decode_bf16_sr(tl.load(x_at0))
    g_at = tl.multiple_of(tl.load(row + 7).to(tl.pointer_type(tl.float32)) + start + each, 16)
    g = plain.decode_fp32(tl.load(g_at))
    scalar0 = tl.load(scalars + 0)
    scalar1 = tl.load(scalars + 1)
    scalar2 = tl.load(scalars + 2)
    scalar3 = tl.load(scalars + 3)
    rounded0 = scalar0.to(tl.float32)
    flag0 = scalar2 > tl.full((), 0.0, tl.float64)
    rounded1 = scalar2.to(tl.float32)
    rounded2 = scalar1.to(tl.float32)
    rounded3 = scalar3.to(tl.float32)
    tile0 = g
    tile1 = tile0 * rounded0
    tile2 = x
    tile3 = rounded1 * tile2
    tile4 = tile1 + tile3
    tile5 = tl.where(flag0, tile4, tile1)
    tile6 = rounded2 * tile5
    tile7 = rounded3 * tile2
    tile8 = tile6 + tile7
    tile9 = tile2 - tile8
    first = tl.load(row + 1) + start
    x_key = noise.key(tl.load(row + 5), step)
    x_noise = noise.tile_bits(x_key, first, TILE)
    x_new0 = stochastic.encode_bf16_sr(tile9, x_noise)
    tl.store(x_at0, x_new0)


@triton.jit
def rest(rows, all_scalars, owners, TILE: tl.constexpr):
    program = tl.program_id(0)
    row = rows + tl.load(owners + program).to(tl.int64) * 8
    start = (program - tl.load(row + 4)) * TILE
    scalars = all_scalars + tl.load(row + 2) * 5
    step = tl.load(scalars + 4)
    each = tl.arange(0, TILE)
    left = tl.load(row + 0) - start
    x_at0 = tl.load(row + 6).to(tl.pointer_type(tl.int16)) + start + each
    x = stochastic.decode_bf16_sr(tl.load(x_at0, mask=each < left, other=0))
    g_at = tl.load(row + 7).to(tl.pointer_type(tl.float32)) + start + each
    g = plain.decode_fp32(tl.load(g_at, mask=each < left, other=0))
    scalar0 = tl.load(scalars + 0)
    scalar1 = tl.load(scalars + 1)
    scalar2 = tl.load(scalars + 2)
    scalar3 = tl.load(scalars + 3)
    rounded0 = scalar0.to(tl.float32)
    flag0 = scalar2 > tl.full((), 0.0, tl.float64)
    rounded1 = scalar2.to(tl.float32)
    rounded2 = scalar1.to(tl.float32)
    rounded3 = scalar3.to(tl.float32)
    tile0 = g
    tile1 = tile0 * rounded0
    tile2 = x
    tile3 = rounded1 * tile2
    tile4 = tile1 + tile3
    tile5 = tl.where(flag0, tile4, tile1)
    tile6 = rounded2 * tile5
    tile7 = rounded3 * tile2
    tile8 = tile6 + tile7
    tile9 = tile2 - tile8
    first = tl.load(row + 1) + start
    x_key = noise.key(tl.load(row + 5), step)
    x_noise = noise.bits(x_key, first + each)
    x_new0 = stochastic.encode_bf16_sr(tile9, x_noise)
    tl.store(x_at0, x_new0, mask=each < left)
'''


@pytest.fixture
def without_triton(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    triton.unavailable.cache_clear()
    reference.say_once.cache_clear()
    yield
    triton.unavailable.cache_clear()


def test_without_triton_the_reference_runs_and_says_so_once(without_triton, caplog):
    expected = make_works("sgd", FORMATS["split"], (), [(30, torch.float32)])
    found = copies(expected)
    reference.step(expected)
    reference.step(expected)
    with caplog.at_level(logging.WARNING):
        triton.step(found)
        triton.step(found)
    assert_same_planes(expected, found)
    assert caplog.messages == [
        "halfword runs its slower reference backend: "
        "Triton is not installed; a build of torch for GPUs brings it"
    ]


def test_without_triton_asking_for_it_by_name_raises(without_triton):
    with pytest.raises(ValueError) as error:
        choose("triton")
    assert str(error.value) == (
        "backend='triton': Triton is not installed; a build of torch for GPUs brings it; "
        "or use backend='auto'"
    )


@needs_triton
@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a GPU")
def test_without_a_gpu_asking_for_it_by_name_raises():
    with pytest.raises(ValueError) as error:
        choose("triton")
    assert str(error.value) == "backend='triton': torch finds no GPU; or use backend='auto'"


def test_auto_goes_by_the_device(monkeypatch):
    taken = {}
    monkeypatch.setattr(native, "step", lambda works: taken.update(native=works))
    monkeypatch.setattr(triton, "step", lambda works: taken.update(triton=works))
    on_cpu, elsewhere = make_works("sgd", FORMATS["split"], (), [(3, torch.float32)] * 2)
    elsewhere.gradient = elsewhere.gradient.to("meta")
    choose("auto")([on_cpu, elsewhere])
    assert taken == {"native": [on_cpu], "triton": [elsewhere]}
    taken.clear()
    choose("auto")([elsewhere])
    assert taken == {"triton": [elsewhere]}


@needs_triton
def test_a_format_or_a_rule_that_cannot_be_had_is_named():
    strange = replace(FORMATS["split"], name="strange")
    with pytest.raises(TypeError, match="^format 'strange' has no Triton piece$"):
        triton_kernels.kernels(RULES["sgd"], (strange,), torch.float32, False)
    rule = replace(RULES["sgd"], update=lambda x, g, slots, scalars: (1.0 / x, slots))
    with pytest.raises(TypeError, match="^rule 'sgd' cannot be printed as Triton [(]a scalar div"):
        triton_kernels.kernels(rule, (FORMATS["split"],), torch.float32, False)


def test_importing_it_does_not_import_triton():
    code = "import sys, halfword.backends.triton; print('triton' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"
    assert backends.BACKENDS["triton"] is triton.step

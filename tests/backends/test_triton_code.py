"""What Triton makes of a step: compiled for GPUs that are not here, with Triton's own ptxas.

No instruction rounds in a way of its own or fewer digits, whole tiles move in 128-bit accesses, and
nothing is spilled.
"""

import re
import subprocess
from collections import Counter
from functools import cache

import pytest
import torch

from halfword.backends.triton_clock import ADDRESS, shape_of
from halfword.backends.triton_kernels import (
    CLOCK_BLOCK,
    NUM_WARPS,
    TILE,
    clock_kernel,
    interprets,
    kernels,
)
from halfword.formats import FORMATS, MASTER_WEIGHTS, moment_format
from halfword.rules import RULES
from halfword.train.config import PRESETS as SETTINGS

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(interprets(), reason="Triton compiles nothing when it interprets")

ARCHITECTURES = (80, 90)
GRADIENT = torch.bfloat16
LARGE = torch.Size((4096, 4096))
APPROXIMATE = re.compile(r"\b(fma|mad\.f\w+|\w+\.approx|div\.full|\w+[.\w]*\.ftz)\b")
ELEMENTS_PER_THREAD = TILE // (32 * NUM_WARPS)

PRESETS = {
    name: (
        "adamw",
        (
            MASTER_WEIGHTS[torch.bfloat16][formats.master_weights],
            *(moment_format(formats.moments, signed, LARGE) for signed in (True, False)),
        ),
    )
    for name, formats in SETTINGS.items()
}
OTHERS = {
    "lion": ("lion", (FORMATS["split24"], FORMATS["bf16-sr"])),
    "sgd_momentum": ("sgd_momentum", (FORMATS["fp16+fp32"], FORMATS["bf16"])),
    "sgd": ("sgd", (FORMATS["fp32"],)),
    "adam": ("adam", (FORMATS["split"], FORMATS["fp32"], FORMATS["bf16-sr"])),
}
COMBINATIONS = PRESETS | OTHERS


@cache
def compiled(name: str, which: str, architecture: int):
    rule, formats = COMBINATIONS[name]
    kernel = getattr(kernels(RULES[rule], formats, GRADIENT, False), which)
    arguments = {"rows": "*i64", "all_scalars": "*fp64", "owners": "*i32"}
    return compile_for(architecture, kernel, arguments, NUM_WARPS, TILE=TILE)


def compile_for(architecture: int, kernel, arguments: dict[str, str], num_warps: int, **constants):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    pointers = [place for place, name in enumerate(arguments.values()) if name[0] == "*"]
    source = ASTSource(
        fn=kernel,
        signature=arguments | dict.fromkeys(constants, "constexpr"),
        constexprs=constants,
        attrs={(place,): [["tt.divisibility", 16]] for place in pointers},
    )
    options = {"enable_fp_fusion": False, "num_warps": num_warps}
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("which", ["full", "rest"])
@pytest.mark.parametrize("name", COMBINATIONS)
def test_every_operation_rounds_once(name, which, architecture):
    ptx = compiled(name, which, architecture).asm["ptx"]
    assert not APPROXIMATE.findall(ptx)
    if name in PRESETS:
        roots_and_quotients = Counter(re.findall(r"\b(?:sqrt|div)\.\w+\.f32\b", ptx))
        assert set(roots_and_quotients) == {"sqrt.rn.f32", "div.rn.f32"}
        assert roots_and_quotients["sqrt.rn.f32"] == ELEMENTS_PER_THREAD


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("which", ["full", "rest"])
@pytest.mark.parametrize("name", COMBINATIONS)
def test_nothing_is_spilled(name, which, architecture, tmp_path):
    binary = tmp_path / "kernel.cubin"
    binary.write_bytes(compiled(name, which, architecture).asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", binary]
    usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack, local = (
        int(re.search(rf"{what}:(\d+)", usage).group(1)) for what in ("REG", "STACK", "LOCAL")
    )
    assert stack == local == 0
    assert registers <= 128 or which == "rest", "16 warps fit a multiprocessor"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", COMBINATIONS)
def test_whole_tiles_move_in_128_bit_accesses(name, architecture):
    """A plane of 1 byte an element moves in 64 bits: a thread has 8 elements."""
    _, formats = COMBINATIONS[name]
    planes = [plane for format in formats for plane in format.planes if plane.block == 1]
    sizes = [plane.dtype.itemsize for plane in planes]
    assembly = compiled(name, "full", architecture).asm["sass"]
    wide = Counter(re.findall(r"\b(LDG|STG)\.E[.\w]*\.128\b", assembly))
    per_plane = [size * ELEMENTS_PER_THREAD // 16 for size in sizes]
    assert wide["STG"] == sum(per_plane)
    assert wide["LDG"] == sum(per_plane) + GRADIENT.itemsize * ELEMENTS_PER_THREAD // 16
    assert not re.search(r"\b(LDG|STG)\.E\.(U8|U16|S8|S16)\b", assembly)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", ["lion", "sgd", "sgd_momentum"])
def test_the_assembler_fuses_nothing(name, architecture):
    """Rules without root or quotient: those are sequences of fused operations, proven exact."""
    assembly = compiled(name, "full", architecture).asm["sass"]
    assert "FMUL" in assembly and "FFMA" not in assembly


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_clock_rounds_each_operation_once_in_float64(architecture):
    settings = {"lr": torch.tensor(0.1), "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
    clock = clock_kernel(RULES["adamw"], shape_of(settings), ADDRESS, True)
    arguments = {"rows": "*i64", "all_scalars": "*fp64", "num_works": "i32"}
    ptx = compile_for(architecture, clock.advance, arguments, 1, BLOCK=CLOCK_BLOCK).asm["ptx"]
    assert not APPROXIMATE.findall(ptx)
    arithmetic = re.findall(r"\b((?:add|sub|mul|div|sqrt)[\w.]*)\.f64\b", ptx)
    assert set(arithmetic) == {"add.rn", "sub.rn", "mul.rn", "div.rn", "sqrt.rn"}

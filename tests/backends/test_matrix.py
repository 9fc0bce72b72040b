"""Every rule in every format on every kind of input, bit for bit against a second program.

The second program is this file's numpy transcription of the numerics (formats, rules, noise), which
shares no code with the package: numbers are numpy FP32 arrays, BF16 are their upper 16 bits.
"""

import contextlib
import hashlib
import math
from itertools import product

import numpy as np
import pytest
import torch

from halfword.backends import BACKENDS, choose
from halfword.formats import MASTER_WEIGHTS
from halfword.rules import RULES
from halfword.stored import TILE
from helpers import OPTIMIZERS, combinations, name_of, require, threads

GRADIENTS = (torch.bfloat16, torch.float32, torch.float16)
GOLDEN = 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1
f32 = np.float32


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """On a busy machine, threads that share an operation mostly wait for each other."""
    with threads(1):
        yield


# Formats: encode(x, noise) -> planes, decode(planes) -> x.


def patterns(x):
    """The bits of FP32 values, every NaN as the one NaN."""
    return np.where(np.isnan(x), np.uint32(0x7FC00000), x.view(np.uint32)).astype(np.int64)


def value(u):
    """FP32 values with these bits, taken modulo 2^32."""
    return (u & 0xFFFFFFFF).astype(np.uint32).view(f32)


def away(x):
    return ((patterns(x) + 0x8000) >> 16).astype(np.uint16)


def encode_bf16(x, noise):
    u = patterns(x)
    return [((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)]


def encode_bf16_sr(x, noise):
    u = patterns(x)
    return [(np.where(np.isfinite(x), u + (noise & 0xFFFF), u) >> 16).astype(np.uint16)]


def decode_bf16(planes):
    return value(planes[0].astype(np.int64) << 16)


def encode_split(x, noise):
    low = (patterns(x) & 0xFFFF).astype(np.uint16)
    return [away(x), low.view(np.int16)]


def decode_split(planes):
    hi, remainder = planes
    return numbers_only(value((hi.astype(np.int64) << 16) + remainder), hi)


def encode_split24(x, noise):
    u = (patterns(x) + 0x80) >> 8
    return [((u + 0x80) >> 8).astype(np.uint16), (u & 0xFF).astype(np.uint8).view(np.int8)]


def decode_split24(planes):
    hi, remainder = planes
    return numbers_only(value(((hi.astype(np.int64) << 8) + remainder) << 8), hi)


def numbers_only(x, hi):
    weight = decode_bf16([hi])
    return np.where(np.isnan(x) & ~np.isnan(weight), weight, x)


def encode_bf16_copy(x, noise):
    return [away(x), x]


def decode_bf16_copy(planes):
    weight, copy = planes
    return np.where(away(copy) == weight, copy, decode_bf16([weight]))


def encode_fp16_copy(x, noise):
    return [x.astype(np.float16), x]


def decode_fp16_copy(planes):
    weight, copy = planes
    same = copy.astype(np.float16).view(np.uint16) == weight.view(np.uint16)
    return np.where(same, copy, weight.astype(f32))


def encode_int8(x, noise):
    """Multiples of the scale."""
    u, inverse, scale = in_blocks(np.abs(x), x, 127, 2.0**-126)
    bits = (u * inverse + f32(768)).view(np.uint32).astype(np.int64)
    codes = ((bits + (noise.reshape(-1, 64) >> 2)) >> 14) - (0x44400000 >> 14)
    return [np.where(np.isnan(scale), 0, codes).astype(np.int8).reshape(-1), scale.reshape(-1)]


def decode_int8(planes):
    codes, scale = planes
    return (codes.reshape(-1, 64).astype(f32) * scale.reshape(-1, 1)).reshape(-1)


def encode_uint8(x, noise):
    """What is left of the bits of x / scale + 2, less those of 2."""
    u, inverse, scale = in_blocks(np.where(x >= 0, x, f32(np.nan)), x, 502, 2.0**-122)
    bits = (u * inverse + f32(2)).view(np.uint32).astype(np.int64)
    codes = ((bits + (noise.reshape(-1, 64) << 2)) >> 18) - (0x40000000 >> 18)
    codes = np.where(np.isnan(scale), 0, np.maximum(codes, u > 0))
    return [codes.astype(np.uint8).reshape(-1), scale.reshape(-1)]


def decode_uint8(planes):
    codes, scale = planes
    octave, place = np.divmod(codes.reshape(-1, 64).astype(f32), f32(32))
    level = np.ldexp(1 + place / 32, octave.astype(int) + 1).astype(f32) - 2
    return (level * scale.reshape(-1, 1)).reshape(-1)


def in_blocks(magnitude, x, top, least):
    """x, 1 / scale and scale, a row for each block."""
    largest = magnitude.reshape(-1, 64).max(1, keepdims=True)
    scale = np.maximum(largest / f32(top), f32(least))
    scale = np.where(np.isfinite(largest), np.where(largest == 0, f32(0), scale), f32(np.nan))
    return x.reshape(-1, 64), np.minimum(f32(top) / largest, f32(1 / least)), scale


FORMATS = {
    "int8": (encode_int8, decode_int8),
    "uint8": (encode_uint8, decode_uint8),
    "fp32": (lambda x, noise: [x], lambda planes: planes[0]),
    "bf16": (encode_bf16, decode_bf16),
    "bf16-sr": (encode_bf16_sr, decode_bf16),
    "split": (encode_split, decode_split),
    "split24": (encode_split24, decode_split24),
    "bf16+fp32": (encode_bf16_copy, decode_bf16_copy),
    "fp16+fp32": (encode_fp16_copy, decode_fp16_copy),
}

# What a setting means: the format, and the state keys beside the first plane or after the slot.
WEIGHTS = {
    (torch.bfloat16, "split"): ("split", ["remainder"]),
    (torch.bfloat16, "split24"): ("split24", ["remainder8"]),
    (torch.bfloat16, "fp32"): ("bf16+fp32", ["master_weight"]),
    (torch.bfloat16, "bf16"): ("bf16", []),
    (torch.bfloat16, "bf16-sr"): ("bf16-sr", []),
    (torch.float16, "fp32"): ("fp16+fp32", ["master_weight"]),
    **{(torch.float32, setting): ("fp32", []) for setting in MASTER_WEIGHTS[torch.float32]},
}
WEIGHTS[torch.bfloat16, "auto"] = WEIGHTS[torch.bfloat16, "split"]
WEIGHTS[torch.float16, "auto"] = WEIGHTS[torch.float16, "fp32"]
EIGHT_BITS = ["_code", "_scale"]
SLOTS = {"fp32": [""], "bf16": ["_bf16"], "bf16-sr": ["_bf16"]} | {
    "int8": EIGHT_BITS,
    "uint8": EIGHT_BITS,
}


def slot_format(setting, name, shape):
    """What a setting of ``moments`` means for one slot of a parameter."""
    if setting != "int8":
        return setting
    if len(shape) < 2 or math.prod(shape) < 4096:
        return "fp32"
    if shape[-1] % 64:
        return "bf16-sr"
    return "uint8" if name == "exp_avg_sq" else "int8"


# Noise: 16 bits as a function of (seed, identity, state, step, index).


def hashed(domain, data):
    digest = hashlib.blake2b(data, digest_size=8, person=domain.ljust(16, b"\0")).digest()
    return int.from_bytes(digest, "little")


def position(index):
    return hashed(b"position", index.to_bytes(8, "little"))


def mix(x):
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)


def noise_bits(seed, identity, state, step, count):
    words = (seed & MASK).to_bytes(8, "little") + identity.to_bytes(8, "little")
    z = (hashed(b"stream", words + state.encode()) + step * GOLDEN) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    z ^= z >> 31
    # The upper word of every index here is 0.
    index = np.arange(count, dtype=np.int64)
    word = mix((mix((index >> 1) ^ (z & 0xFFFFFFFF)) + (z >> 32)) & 0xFFFFFFFF)
    return np.where(index & 1, word >> 16, word & 0xFFFF)


# Rules: (x, g, slots, hyper-parameters, step) -> (x, slots), each operation rounded once to FP32.


def power(base, exponent):
    """The squares of ``base`` for the bits of ``exponent``, multiplied lowest first."""
    result = 1.0
    for bit in reversed(f"{exponent:b}"):
        result *= base if bit == "1" else 1.0
        base *= base
    return result


def adamw(x, g, slots, h, t, coupled=False):
    m, v = slots
    beta1, beta2 = h["betas"]
    c = math.sqrt(1 - power(beta2, t))
    decay = f32(0 if coupled else h["lr"] * h["weight_decay"])
    if coupled:
        g = g + f32(h["weight_decay"]) * x
    m = m + f32(1 - beta1) * (g - m)
    v = f32(beta2) * v + (f32(1 - beta2) * g) * g
    alpha = f32(h["lr"] * c / (1 - power(beta1, t)))
    x = x - (alpha * (m / (np.sqrt(v) + f32(h["eps"] * c))) + decay * x)
    return x, [m, v]


def adam(x, g, slots, h, t):
    return adamw(x, g, slots, h, t, coupled=True)


def lion(x, g, slots, h, t):
    (m,) = slots
    beta1, beta2 = h["betas"]
    direction = m + f32(1 - beta1) * (g - m)
    direction = np.where(np.isnan(direction), direction, np.sign(direction))
    x = x - (f32(h["lr"]) * direction + f32(h["lr"] * h["weight_decay"]) * x)
    return x, [m + f32(1 - beta2) * (g - m)]


def sgd(x, g, slots, h, t):
    decoupled = h["decoupled_weight_decay"]
    if h["weight_decay"] and not decoupled:
        g = g + f32(h["weight_decay"]) * x
    b = g
    if slots and t > 1:
        b = f32(h["momentum"]) * slots[0] + f32(1 - h["dampening"]) * g
    ahead = g + f32(h["momentum"]) * b if h["nesterov"] else b
    decay = f32(h["lr"] * h["weight_decay"] if decoupled else 0)
    return x - (f32(h["lr"]) * ahead + decay * x), [b] * len(slots)


UPDATES = {"adamw": adamw, "adam": adam, "lion": lion, "sgd": sgd, "sgd_momentum": sgd}


class Mirror:
    """One parameter of an optimizer and its gradient, held and stepped by the transcription."""

    def __init__(self, opt, p, rule, index):
        group = opt.param_groups[0]
        self.hyper, self.update, self.seed = group, UPDATES[rule], group["seed"]
        self.identity, self.steps = position(index), 0
        self.weight, keys = WEIGHTS[p.dtype, group["master_weights"]]
        self.names = [slot.name for slot in RULES[rule].slots]
        moments = group["moments"]
        moments = [moments] * len(self.names) if isinstance(moments, str) else moments
        self.formats = [
            slot_format(setting, name, p.shape)
            for setting, name in zip(moments, self.names, strict=True)
        ]
        self.keys = [keys] + [
            [name + suffix for suffix in SLOTS[format]]
            for name, format in zip(self.names, self.formats, strict=True)
        ]
        self.gradient, self.dtype = p.grad, p.dtype
        weight, *slots = self.keys
        self.planes = [[flat(p), *(flat(opt.state[p][key]) for key in weight)]]
        self.planes += [[flat(opt.state[p][key]) for key in keys] for keys in slots]

    def write_weights(self):
        where, weights = written_weights(self.planes[0][0].size)
        self.planes[0][0] = np.where(where.numpy(), flat(weights.to(self.dtype)), self.planes[0][0])

    def step(self, scale=1.0):
        if self.gradient is None:
            return
        self.steps += 1
        with np.errstate(all="ignore"):
            x, *slots = (
                FORMATS[format][1](planes)
                for format, planes in zip([self.weight, *self.formats], self.planes, strict=True)
            )
            g = flat(self.gradient.float()) * f32(scale)
            x, slots = self.update(x, g, slots, self.hyper, self.steps)
            slots = [np.where(np.abs(s) < f32(2.0**-126), f32(0), s) for s in slots]
            self.planes = [
                FORMATS[format][0](values, self.noise(format, state, values.size))
                for format, state, values in zip(
                    [self.weight, *self.formats], ["weight", *self.names], [x, *slots], strict=True
                )
            ]

    def noise(self, format, state, count):
        if not format.endswith(("-sr", "int8")):
            return None
        return noise_bits(self.seed, self.identity, state, self.steps, count)

    def check(self, opt, p, what):
        mine = [self.planes[0][0], *self.planes[0][1:], *sum(self.planes[1:], [])]
        names = ["weight", *sum(self.keys, [])]
        assert set(opt.state[p]) == {"step", *names[1:]}
        assert opt.state[p]["step"].item() == self.steps
        for name, expected in zip(names, mine, strict=True):
            found = flat(p if name == "weight" else opt.state[p][name])
            assert same(found, expected), f"{what}: {name} differs"
        with np.errstate(over="ignore"):
            master = FORMATS[self.weight][1](self.planes[0])
        assert same(flat(opt.master_weight(p)), master), f"{what}: master weight differs"


def flat(tensor):
    """The elements in row-major order as numpy has them; BF16 as their bits."""
    tensor = tensor.detach().reshape(-1).clone()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    return tensor.numpy()


def same(a, b):
    """Bit for bit; a NaN in an FP32 or FP16 plane may be any NaN, elsewhere it is the one NaN."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.dtype.kind == "f":
        a, b = (np.where(np.isnan(x), x.dtype.type(np.nan), x) for x in (a, b))
    return a.tobytes() == b.tobytes()


# Inputs.

SPECIAL_WEIGHTS = np.array(
    [
        *(0x00000000, 0x80000000, 0x00000001, 0x807FFFFF, 0x00800000, 0x3F800000, 0xBF808000),
        *(0x3F818000, 0x3F807FFF, 0x33D6BF95, 0x7F7F0000, 0x7F7FFFFF, 0xFF7F8000, 0x7F800000),
        *(0xFF800000, 0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F810000, 0x477FE000, 0x33000000),
    ],
    dtype=np.uint32,
).view(f32)
SPECIAL_GRADIENTS = np.array(
    [0.0, -0.0, 1.0, -1.0, 1e-3, -2.5e-7, 1e-20, 1e-40, 3e38, -3e38, np.inf, -np.inf, np.nan],
    dtype=f32,
)


def specials():
    """Every special weight beside every special gradient."""
    pairs = np.array(list(product(SPECIAL_WEIGHTS, SPECIAL_GRADIENTS)), dtype=f32)
    return torch.from_numpy(pairs[:, 0].copy()), torch.from_numpy(pairs[:, 1].copy())


def inputs(dtype):
    """Parameters with gradients: special values in each gradient dtype, odd sizes and strides."""
    generator = torch.Generator().manual_seed(7)

    def randn(*shape):
        return torch.randn(shape, generator=generator)

    weights, gradients = specials()
    pairs = [(weights.clone(), gradients.to(kind)) for kind in GRADIENTS]
    pairs += [
        (randn(), randn()),
        (randn(0, 3), randn(0, 3).bfloat16()),
        (randn(1), randn(1).half()),
        (randn(7), randn(7).bfloat16()),
        (randn(5, 9).t(), randn(9, 5)),  # a strided parameter, a contiguous gradient
        (randn(9, 5), randn(5, 9).bfloat16().t()),  # and the other way
        (randn(6, 8)[:, ::2], randn(6, 4).bfloat16()),  # with gaps in memory
        (randn(4, 6), randn(6).bfloat16().expand(4, 6)),
        (randn(3, 2), randn().expand(3, 2)),
        (randn(64, 64), randn(64, 64).bfloat16()),  # whole blocks
        (randn(128, 40).t(), randn(40, 128)),  # across the memory
        (randn(2, 32, 65), randn(2, 32, 65).bfloat16()),  # and none
        (randn(TILE + 1), randn(TILE + 1).bfloat16()),
    ]
    made = []
    for weight, gradient in pairs:
        # Not the weight's own cast: that would close the gaps.
        p = torch.nn.Parameter(weight if dtype == torch.float32 else keep_strides(weight, dtype))
        p.grad_dtype = None
        p.grad = gradient
        made.append(p)
    return made


def keep_strides(tensor, dtype):
    storage = torch.empty(tensor.untyped_storage().nbytes() // 4, dtype=dtype)
    return storage.as_strided(tensor.shape, tensor.stride()).copy_(tensor)


def fill_with_any_bits(opt, p, seed):
    """Write random bits into every plane: no pattern may break a step."""
    generator = np.random.default_rng(seed)
    planes = [p, *(plane for key, plane in opt.state[p].items() if key != "step")]
    for plane in planes:
        raw = torch.from_numpy(generator.integers(0, 256, plane.nbytes, dtype=np.uint8))
        plane.data.copy_(raw.view(plane.dtype).view(plane.shape))


def test_every_rule_has_an_optimizer_here():
    assert set(OPTIMIZERS) == set(RULES) == set(UPDATES)
    for name, make in OPTIMIZERS.items():
        opt = make([torch.nn.Parameter(torch.zeros(1))])
        assert opt.rule(opt.param_groups[0]) is RULES[name]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_that_cannot_run_here_is_reported(backend):
    """As a skip with its reason: the matrix below runs those that can."""
    require(backend)


@pytest.mark.parametrize("combination", combinations(), ids=name_of)
def test_a_step_has_the_bits_of_the_definition(combination):
    runs = {backend: prepared(combination, backend) for backend in usable_backends()}
    first = runs["reference"]
    mirrors = [
        Mirror(first, p, combination[0], index)
        for index, p in enumerate(first.param_groups[0]["params"])
    ]
    for step in range(3):
        for mirror in mirrors:
            if step == 2:
                mirror.write_weights()
            mirror.step()
        for backend, opt in runs.items():
            params = opt.param_groups[0]["params"]
            if step == 2:
                write_from_outside(params)
            opt.step()
            for index, (p, mirror) in enumerate(zip(params, mirrors, strict=True)):
                mirror.check(opt, p, f"{backend}, step {step}, parameter {index}")
                if p.numel() > TILE:  # once over the edge of a tile is enough
                    p.grad = mirror.gradient = None


def usable_backends():
    for backend in BACKENDS:
        with contextlib.suppress(ValueError):
            choose(backend)
            yield backend


def prepared(combination, backend):
    """An optimizer with gradients for every parameter; the last holds random bits."""
    rule, dtype, master_weights, moments = combination
    params = inputs(dtype)
    params.append(torch.nn.Parameter(torch.zeros(33, 128, dtype=dtype)))
    params[-1].grad_dtype = None
    params[-1].grad = torch.from_numpy(SPECIAL_GRADIENTS).repeat(325)[: 33 * 128].view(33, 128)
    opt = OPTIMIZERS[rule](
        params,
        master_weights=master_weights,
        moments=moments or "fp32",
        seed=-3,
        backend=backend,
    )
    fill_with_any_bits(opt, params[-1], seed=len(name_of(combination)))
    return opt


def written_weights(count):
    """Which elements are overwritten from outside, and with what."""
    index = torch.arange(count)
    return index % 3 == 0, torch.from_numpy(SPECIAL_WEIGHTS)[index % len(SPECIAL_WEIGHTS)]


def write_from_outside(params):
    """Overwrite every third weight behind the optimizer's back."""
    for p in params:
        where, weights = (t.view(p.shape) for t in written_weights(p.numel()))
        p.data.copy_(torch.where(where, weights.to(p.dtype), p.data))


VARIANTS = [
    ("adamw", {"betas": (0.0, 0.5), "eps": 1e-3, "weight_decay": 0.0}),
    ("adamw", {"betas": (torch.tensor(0.9), torch.tensor(0.95)), "lr": torch.tensor(3e-4)}),
    ("adam", {"weight_decay": 0.0}),
    ("adamw", {"lr": 0.0}),
    ("lion", {"betas": (0.95, 0.98), "weight_decay": 0.0}),
    ("sgd", {"decoupled_weight_decay": True}),
    ("sgd", {"weight_decay": 0.0}),
    ("sgd_momentum", {"nesterov": True, "dampening": 0.0}),
    ("sgd_momentum", {"decoupled_weight_decay": True, "nesterov": True, "dampening": 0.0}),
    ("sgd_momentum", {"weight_decay": 0.0, "dampening": -0.5}),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize(
    ("rule", "settings"), VARIANTS, ids=[f"{rule}-{'-'.join(more)}" for rule, more in VARIANTS]
)
def test_hyper_parameters_clipping_and_maximize_enter_as_defined(rule, settings, maximize, backend):
    require(backend)
    generator = torch.Generator().manual_seed(3)
    params = [torch.nn.Parameter(torch.randn(300, generator=generator).bfloat16())]
    opt = OPTIMIZERS[rule](params, maximize=maximize, backend=backend, **settings)
    mirror = Mirror(opt, params[0], rule, 0)
    mirror.hyper = {
        key: tuple(map(float, value)) if key == "betas" else value
        for key, value in opt.param_groups[0].items()
    } | {"lr": float(opt.param_groups[0]["lr"])}
    for max_norm in (1e9, 1.0, 0.0, math.inf, 0.3):
        params[0].grad = torch.randn(300, generator=generator).bfloat16()
        before = params[0].grad.clone()
        norm = opt.clip_grad_norm(max_norm)
        exact = params[0].grad.double().square().sum().sqrt().item()
        assert math.isclose(norm.item(), exact, rel_tol=1e-12)
        opt.step()
        assert torch.equal(params[0].grad, before), "clipping may not rewrite gradients"
        # The coefficient of torch.nn.utils.clip_grad_norm_, in float64.
        coefficient = min(1.0, max_norm / (norm.item() + 1e-6))
        mirror.gradient = params[0].grad
        mirror.step(-coefficient if maximize else coefficient)
        mirror.check(opt, params[0], f"max_norm {max_norm}")


@pytest.mark.parametrize("rule", RULES)
def test_fp32_parameters_are_their_own_master_under_every_setting(rule):
    ends = []
    for setting in MASTER_WEIGHTS[torch.bfloat16]:
        p = torch.nn.Parameter(torch.linspace(-1, 1, 50))
        opt = OPTIMIZERS[rule]([p], master_weights=setting)
        for _ in range(3):
            p.grad = torch.linspace(1, 2, 50)
            opt.step()
        assert same(flat(opt.master_weight(p)), flat(p))
        ends.append(flat(p))
    assert all(same(ends[0], end) for end in ends)


@pytest.mark.parametrize("rule", RULES)
def test_parameters_that_share_a_group_do_not_disturb_each_other(rule):
    """Empty, tiny and large ones in one group end where each would alone."""
    together = inputs(torch.bfloat16)
    opt = OPTIMIZERS[rule](together)
    opt.step()
    for p, q in zip(inputs(torch.bfloat16), together, strict=True):
        OPTIMIZERS[rule]([p]).step()
        assert same(flat(p), flat(q))

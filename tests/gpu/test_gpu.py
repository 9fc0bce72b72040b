"""The Triton backend on a GPU: its bits at size, graphs, memory, streams. Run by ``make gpu``."""

from dataclasses import replace

import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

from halfword import AdamW, noise
from halfword.backends import Work, choose, native, reference, triton
from halfword.formats import FORMATS
from halfword.rules import RULES
from halfword.stored import Stored
from helpers import assert_same_training, feed, parameters, same, snapshot
from works import assert_same_planes, make_works

DEVICE = torch.accelerator.current_accelerator()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE is None, reason="needs a GPU"),
    pytest.mark.skipif(bool(triton.unavailable()), reason=str(triton.unavailable())),
]
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

SAMPLE = [
    ("adamw", "split", ("fp32", "fp32")),
    ("adamw", "split", ("bf16-sr", "bf16-sr")),
    ("adamw", "bf16", ("bf16", "bf16")),
    ("adamw", "bf16-sr", ("bf16-sr", "fp32")),
    ("adam", "bf16+fp32", ("fp32", "bf16")),
    ("lion", "split24", ("bf16-sr",)),
    ("sgd_momentum", "fp16+fp32", ("fp32",)),
    ("sgd", "fp32", ()),
]
GRADIENTS = (torch.bfloat16, torch.float32, torch.float16)


@pytest.fixture(autouse=True)
def _no_poison():
    """Filling what tests of this size allocate takes longer than they do."""
    torch.use_deterministic_algorithms(False)


def on_gpu(all_works: list[Work]) -> list[Work]:
    def moved(stored: Stored) -> Stored:
        return replace(stored, planes=tuple(plane.to(DEVICE) for plane in stored.planes))

    return [
        replace(
            work,
            weight=moved(work.weight),
            slots=tuple(map(moved, work.slots)),
            gradient=work.gradient.to(DEVICE),
            kept={},
        )
        for work in all_works
    ]


def on_cpu(all_works: list[Work]) -> list[Work]:
    return [
        replace(
            work,
            weight=replace(work.weight, planes=tuple(p.cpu() for p in work.weight.planes)),
            slots=tuple(replace(s, planes=tuple(p.cpu() for p in s.planes)) for s in work.slots),
        )
        for work in all_works
    ]


@pytest.mark.parametrize(("rule", "weight", "slots"), SAMPLE)
def test_every_kind_of_combination_has_the_bits_of_the_reference(rule, weight, slots):
    sizes = [(count, dtype) for count in (0, 1, 1024, 5003) for dtype in GRADIENTS]
    expected = make_works(rule, FORMATS[weight], tuple(FORMATS[slot] for slot in slots), sizes)
    found = on_gpu(expected)
    triton.step(found)
    reference.step(expected)
    assert_same_planes(expected, on_cpu(found))


@pytest.mark.parametrize(("rule", "weight", "slots"), SAMPLE[:3])
def test_100_million_parameters_have_the_bits_of_the_cpu_backend(rule, weight, slots):
    formats = FORMATS[weight], tuple(FORMATS[slot] for slot in slots)
    expected = make_works(rule, *formats, [(100_000_003, torch.bfloat16)])
    found = on_gpu(expected)
    triton.step(found)
    native.step(expected)
    assert_same_planes(expected, on_cpu(found))


def test_a_tensor_may_have_more_than_2_to_the_31_elements():
    count, checked = 2**31 + 70_001, 100_000
    generator = torch.Generator(DEVICE).manual_seed(5)
    made = {"device": DEVICE, "dtype": torch.bfloat16}
    weights = torch.randn(count, generator=generator, **made)
    gradient = torch.randn(count, generator=generator, **made)
    stream, scalars = noise.stream(1, 2, "weight"), (0.5, 0.0, 0.25)
    start = count - checked
    end = Work(
        rule=RULES["sgd"],
        scalars=scalars,
        weight=Stored(FORMATS["bf16-sr"], (weights[start:].cpu(),), stream),
        slots=(),
        gradient=gradient[start:].cpu(),
        gradient_scale=1.0,
        step=3,
        start=start,
    )
    whole = replace(
        end,
        weight=Stored(FORMATS["bf16-sr"], (weights,), stream),
        gradient=gradient,
        start=0,
        kept={},
    )
    triton.step([whole])
    reference.step([end])
    assert same(weights[start:].cpu(), end.weight.planes[0])


def test_it_is_what_auto_takes(monkeypatch):
    monkeypatch.setattr(reference, "step", lambda works: pytest.fail("left") if works else None)
    assert choose("auto") is not triton.step
    params = gpu_parameters()
    opt = AdamW(params)
    feed(params, 0)
    opt.step()
    assert all(opt.state[p]["step"] == 1 for p in params)


def gpu_parameters(dtype: torch.dtype = torch.bfloat16) -> list[torch.nn.Parameter]:
    plain = [p for p in parameters(dtype) if p.is_contiguous()]
    generator = torch.Generator().manual_seed(2)
    plain.append(torch.nn.Parameter(torch.randn(300, 77, generator=generator).to(dtype)))
    return [torch.nn.Parameter(p.detach().to(DEVICE)) for p in plain]


@needs_cuda
def test_a_step_never_waits_for_the_device():
    params = gpu_parameters()
    opt = AdamW(params, moments="bf16-sr")
    feed(params, 0)
    opt.step()
    feed(params, 1)
    torch.cuda.set_sync_debug_mode("error")
    try:
        opt.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_cuda
@pytest.mark.parametrize("policy", ["propagate", "skip"])
def test_ten_replays_of_a_graph_are_ten_steps(policy):
    """With a learning rate that changes, clipping, stochastic rounding, and one skipped step."""
    ends = []
    for captured in (True, False):
        params = gpu_parameters()
        rate = torch.tensor(1e-2, dtype=torch.float64)
        opt = AdamW(
            params, lr=rate, moments="bf16-sr", on_nonfinite=policy, capturable=True, seed=4
        )
        for p in params:
            p.grad = torch.zeros_like(p)
        step = step_of(opt)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        if captured:
            with torch.cuda.graph(graph):
                step()
        for number in range(10):
            write_gradients(params, number, bad=policy == "skip" and number == 4)
            opt.param_groups[0]["lr"].mul_(0.8)
            graph.replay() if captured else step()
            assert opt.step_was_skipped == (policy == "skip" and number == 4)
        ends.append(opt)
    assert_same_training(*ends)
    assert ends[0].state[params[0]].keys() == ends[1].state[params[0]].keys()


def step_of(opt):
    def step():
        opt.clip_grad_norm(1.0)
        opt.step()

    return step


def write_gradients(params, number, bad):
    generator = torch.Generator().manual_seed(number)
    for p in params:
        p.grad.copy_(torch.randn(p.shape, generator=generator))
    if bad:
        params[0].grad[1, 1] = torch.inf


@needs_cuda
def test_a_graph_may_hold_the_backward_pass_too():
    ends = []
    for captured in (True, False):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))
        model.to(DEVICE, torch.bfloat16)
        opt = AdamW(model.parameters(), lr=1e-2, capturable=True)
        x = torch.randn(16, 64, device=DEVICE, dtype=torch.bfloat16)

        def train(model=model, opt=opt, x=x):
            opt.zero_grad(set_to_none=True)
            model(x).square().mean().backward()
            opt.step()

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            train()
        torch.cuda.current_stream().wait_stream(side)
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                train()
            train = graph.replay
        for _ in range(10):
            train()
        ends.append(snapshot(opt))
    for one, other in zip(*ends, strict=True):
        assert all(same(one[key], other[key]) for key in one)


@needs_cuda
def test_a_graph_without_capturable_is_refused():
    params = gpu_parameters()
    opt = AdamW(params)
    feed(params, 0)
    opt.step()
    graph = torch.cuda.CUDAGraph()
    message = "a step can be captured in a graph with capturable=True"
    with pytest.raises(RuntimeError, match=message), torch.cuda.graph(graph):
        opt.step()


def test_a_step_allocates_no_memory_to_speak_of():
    count = 1 << 26
    p = torch.nn.Parameter(torch.zeros(count, device=DEVICE, dtype=torch.bfloat16))
    opt = AdamW([p], moments="bf16-sr")
    p.grad = torch.ones_like(p)
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    opt.step()
    assert torch.accelerator.max_memory_allocated() - before <= 1 << 20


def test_streams_are_followed():
    ends = []
    for streams in (2, 1):
        params = gpu_parameters()
        opt = AdamW(params, moments="bf16-sr")
        others = [torch.Stream(DEVICE) for _ in range(streams)]
        for step in range(6):
            current = others[step % streams]
            current.wait_stream(others[(step - 1) % streams])
            with current:
                feed(params, step)
                opt.step()
        torch.accelerator.synchronize()
        ends.append(opt)
    assert_same_training(*ends)


@needs_cuda
def test_a_grad_scaler_skips_and_scales():
    ends = []
    for backend in ("triton", "reference"):
        params = gpu_parameters(torch.float32)
        opt = AdamW(params, backend=backend)
        scaler = torch.amp.GradScaler(init_scale=4.0)
        for step in range(4):
            feed(params, step)
            for p in params:
                p.grad *= 4.0
            if step == 2:
                params[0].grad[0, 0] = torch.inf
            scaler.scale(torch.zeros((), device=DEVICE))
            scaler.step(opt)
            scaler.update(4.0)
        ends.append(opt)
    assert_same_training(*ends)


@pytest.mark.parametrize("released", [False, True])
def test_shards_of_fsdp2_have_the_bits_of_the_reference(released):
    kind = distributed.get_default_backend_for_device(DEVICE)
    distributed.init_process_group(kind, store=distributed.HashStore(), rank=0, world_size=1)
    ends = []
    try:
        for backend in ("triton", "reference"):
            torch.manual_seed(0)
            layers = [nn.Linear(64, 96), nn.Linear(96, 64)]
            model = nn.Sequential(*layers).to(DEVICE, torch.bfloat16)
            for unit in (*layers, model):
                fully_shard(unit)
            opt = AdamW(model.parameters(), moments="bf16-sr", backend=backend)
            if released:
                opt.release_gradients()
            for _ in range(3):
                batch = torch.randn(8, 64).to(DEVICE, torch.bfloat16)
                model(batch).float().square().mean().backward()
                if not released:
                    opt.clip_grad_norm(0.5)
                opt.step()
                opt.zero_grad()
            ends.append(opt)
        assert_same_training(*ends)
    finally:
        distributed.destroy_process_group()

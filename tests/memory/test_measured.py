import pytest
import torch

from halfword import AdamW
from halfword.formats import MASTER_WEIGHTS, MOMENTS

SHAPE = (64, 128)
COUNT = 64 * 128


def _memory(**settings):
    p = torch.nn.Parameter(torch.randn(SHAPE).bfloat16())
    opt = AdamW([p], **settings)
    p.grad = torch.randn_like(p)
    return opt.memory()


@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("master", MASTER_WEIGHTS[torch.bfloat16])
def test_bytes_are_what_the_formats_say(master, moments):
    memory = _memory(master_weights=master, moments=moments)
    weight, slot = MASTER_WEIGHTS[torch.bfloat16][master], MOMENTS[moments]
    expected = weight.bytes_per_element + 2 * slot.bytes_per_element + 2
    assert memory.total_bytes == expected * COUNT + 4  # the step counter
    assert memory.num_parameters == COUNT


@pytest.mark.parametrize(
    ("master", "moments", "expected"),
    [
        ("fp32", "fp32", 16),
        ("split", "fp32", 14),
        ("split", "bf16-sr", 10),
        ("bf16", "bf16", 8),
        ("split", "int8", 8.125),
        ("split24", "int8", 7.125),  # 5.125 where gradients are released
    ],
)
def test_presets_take_the_bytes_that_the_design_states(master, moments, expected):
    memory = _memory(master_weights=master, moments=moments)
    assert memory.total_bytes - memory.components["scalars"]["step"] == expected * COUNT


def test_components_name_their_planes():
    assert _memory(moments=("bf16", "fp32")).components == {
        "weights": {"bfloat16": 2 * COUNT},
        "scalars": {"step": 4},
        "master_weights": {"remainder": 2 * COUNT},
        "moments": {"exp_avg_bf16": 2 * COUNT, "exp_avg_sq": 4 * COUNT},
        "gradients": {"bfloat16": 2 * COUNT},
    }
    assert _memory(moments="int8").components["moments"] == {
        "exp_avg_code": COUNT,
        "exp_avg_scale": 4 * COUNT // 64,
        "exp_avg_sq_code": COUNT,
        "exp_avg_sq_scale": 4 * COUNT // 64,
    }


def test_a_shared_storage_counts_once():
    flat = torch.zeros(COUNT).bfloat16()
    halves = [torch.nn.Parameter(flat[: COUNT // 2]), torch.nn.Parameter(flat[COUNT // 2 :])]
    memory = AdamW(halves).memory()
    assert memory.components["weights"] == {"bfloat16": 2 * COUNT}
    assert memory.num_parameters == COUNT


def test_an_expanded_gradient_counts_what_it_holds():
    p = torch.nn.Parameter(torch.zeros(8, 8))
    opt = AdamW([p])
    p.grad = torch.ones(1, 1).expand(8, 8)
    assert opt.memory().components["gradients"] == {"float32": 4}

"""ZeRO stages on 2, 3 and 4 ranks: one launch of each world size, looked at from many sides."""

import functools
import itertools
import math
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

import parallel_cases as cases
from halfword import AdamW
from halfword.formats import MASTER_WEIGHTS, moment_format
from halfword.parallel import Parallel, parallelize
from halfword.rules import RULES
from halfword.stored import state_keys
from halfword.train.config import TrainConfig
from halfword.train.loop import train_step
from halfword.train.training import build
from helpers import name_of
from ranks import launch

SIZES = (2, 3, 4)
WORLDS = (1, *SIZES)
STEPS = 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def settings(folder: Path) -> dict[str, Any]:
    """A small run whose global batch is the same for every world size."""
    text = folder / "text.txt"
    text.write_text(Path(cases.__file__).read_text() * 2, encoding="utf-8")
    return {
        **{"num_layers": 1, "hidden_dim": 32, "num_heads": 2, "seq_length": 32},
        **{"batch_size": 8, "num_steps": STEPS, "lr_schedule": "constant", "lr_warmup_steps": 0},
        **{"learning_rate": 1e-3, "tie_embeddings": True, "vocab_size": 259, "threads": 1},
        **{"device": "cpu", "data": str(text)},
    }


@pytest.fixture(scope="module")
def of(folder: Path, settings: dict[str, Any]) -> Any:
    """Return what the ranks of a world found; the world of 4 comes first, for it saves."""

    @functools.cache
    def found(size: int) -> list[dict[str, Any]] | RuntimeError:
        try:
            return launch(size, cases.run_all, str(folder), settings)
        except RuntimeError as error:  # each test is to fail, but not to launch again
            return error

    def of(size: int, part: str) -> list[Any]:
        for ranks in (found(4), found(size)):
            if isinstance(ranks, RuntimeError):
                raise ranks
        return [rank[part] for rank in ranks]

    return of


@pytest.fixture(scope="module")
def alone(settings: dict[str, Any]) -> Any:
    """Return the single process with the same global batch."""
    before = torch.get_num_threads()
    training = build(TrainConfig(**settings))
    rows = [train_step(training, step) for step in range(STEPS)]
    torch.set_num_threads(before)
    return [row.loss for row in rows]


def plain(dtype: torch.dtype) -> torch.nn.Module:
    return cases.Net().to(dtype)


@pytest.mark.parametrize("size", WORLDS)
@pytest.mark.parametrize("combination", cases.COMBINATIONS, ids=name_of)
def test_the_same_gradients_give_the_same_bits_in_every_stage_and_world(of, combination, size):
    """Weights, masters, remainders and moments; uneven, empty, tied and frozen parameters."""
    stages = cases.stages_of(size, combination)
    for rank in of(size, "formats"):
        found = {stage: rank[stage, name_of(combination)] for stage in stages}
        assert found == {stage: [] for stage in stages}


@pytest.mark.parametrize("size", SIZES)
def test_tensor_parallel_and_hybrid_layouts_give_the_same_bits(of, size):
    for found in of(size, "other layouts"):
        assert len(found) == (5 if size == 4 else 1)
        assert not any(found.values()), found


@pytest.mark.parametrize("size", SIZES)
def test_what_is_no_box_is_refused_by_name(of, size):
    message = (
        "parameter 'w' has placements (Partial(sum),): a shard must be one box of the tensor; "
        "use Shard or Replicate"
    )
    assert set(of(size, "refused")) == {message}


@pytest.mark.parametrize("size", SIZES)
def test_a_shard_that_cuts_a_block_is_refused_by_name(of, size):
    for message in of(size, "cut block"):
        assert message.startswith("parameter 'w': its shard has columns ")
        assert message.endswith("cuts a block of 64; shard rows, or choose other moments")


@pytest.mark.parametrize("size", SIZES)
def test_an_infinity_on_one_rank_stops_all(of, size):
    *others, last = of(size, "nonfinite")
    assert all(one["skipped"] and one["unchanged"] for one in (*others, last))
    assert all(one["norm"] == math.inf for one in (*others, last))
    assert last["message"].startswith("parameter 'wide' has a gradient that is not finite")
    assert all(
        one["message"].startswith("a parameter of another rank has a gradient that is not finite")
        for one in others
    )


@pytest.mark.parametrize("size", SIZES)
def test_a_norm_counts_each_element_once(of, size):
    model = plain(torch.bfloat16)
    squares = sum(
        cases.gradient(name, p, 0).double().square().sum().item()
        for name, p in model.named_parameters()
        if p.requires_grad
    )
    ranks = of(size, "norms")
    assert all(one == ranks[0] for one in ranks)
    for name, norm in ranks[0].items():
        if name != "process group":
            assert math.isclose(norm, math.sqrt(squares), rel_tol=1e-12), name
    over_all = math.sqrt(sum(3 * rank**2 for rank in range(1, size + 1)))
    assert math.isclose(ranks[0]["process group"], over_all, rel_tol=1e-12)


def test_adapters_over_a_frozen_model_train_alike_in_every_stage(of):
    found = of(2, "adapters")[0]
    assert all(found[stage] == found[0] for stage in cases.STAGES)


def follows(found: dict[str, Any], ranks: list[dict[str, Any]], alone: list[float]) -> list[str]:
    """What is wrong with a training, compared with the single process and among ranks."""
    wrong = []
    pairs = zip(found["losses"], alone, strict=False)
    if max(abs(a - b) for a, b in pairs) > 0.005:
        wrong.append("losses")
    if any(one["digests"] != found["digests"] for one in ranks):
        wrong.append("digests")
    return wrong


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("stage", cases.STAGES)
def test_training_follows_the_single_process(of, alone, stage, size):
    ranks = [rank[f"stage {stage}"] for rank in of(size, "trainings")]
    assert len(ranks[0]["losses"]) == STEPS and ranks[0]["tokens"] == 8 * 32
    assert follows(ranks[0], ranks, alone) == []
    if stage < 2:  # every rank computes by weights of its own
        assert all(one["used"] == ranks[0]["used"] for one in ranks)


@pytest.mark.parametrize("size", [2, 4])
def test_without_the_reduction_the_same_check_fails(of, alone, size):
    for stage in cases.STAGES:
        ranks = [rank[f"not reduced {stage}"] for rank in of(size, "trainings")]
        assert follows(ranks[0], ranks, alone) != [], stage


def test_stages_are_equal_bit_for_bit(of):
    two, four = of(2, "trainings")[0], of(4, "trainings")[0]
    for stage in cases.STAGES:
        assert two[f"stage {stage}"]["losses"] == two["stage 0"]["losses"]
        assert two[f"stage {stage}"]["digests"] == two["stage 0"]["digests"]
        assert two[f"accumulated {stage}"]["digests"] == two["accumulated 0"]["digests"]
    assert four["stage 2"] == four["stage 3"]
    assert four["stage 0"]["digests"] == four["stage 1"]["digests"]


def test_choices_of_memory_do_not_change_bits(of):
    found = of(2, "trainings")[0]
    assert found["recomputed"]["digests"] == found["short"]["digests"]
    assert found["offloaded"]["digests"] == found["short"]["digests"]
    assert found["accumulated, offloaded"]["digests"] == found["accumulated 3"]["digests"]
    losses = zip(found["summed in bf16"]["losses"], found["short"]["losses"], strict=True)
    assert all(abs(a - b) < 0.005 for a, b in losses)


def test_hybrid_sharding_accumulates_as_copies_do(of):
    ranks = of(4, "trainings")
    copies = ranks[0]["accumulated 0"]
    assert ranks[0]["hybrid 1"]["digests"] == copies["digests"]
    for stage in (1, 3):
        found = [rank[f"hybrid {stage}"] for rank in ranks]
        assert follows(found[0], found, copies["losses"]) == [], stage


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(("stage", "precision"), cases.SAVED)
def test_what_4_ranks_saved_is_whole_on_others(of, folder, stage, precision, size):
    """Every plane, element by element; and a step more is that of a run left alone."""
    assert [rank[stage, precision] for rank in of(4, "saves")] == [[]] * 4
    for into, rank in itertools.product(cases.STAGES, of(size, "loads")):
        assert rank[stage, precision, into] == [], f"into stage {into}"
    if size == 1:
        assert cases.loaded(plain, precision, folder / f"{stage}-{precision}") == []


@pytest.mark.parametrize("size", [1, 2, 3])
def test_from_stage_3_to_0_and_back_all_is_whole(of, size):
    for precision, rank in itertools.product(cases.PRESETS, of(size, "loads")):
        assert rank["back", precision] == [], precision


@pytest.mark.parametrize("size", SIZES)
def test_bytes_on_each_rank_are_what_arithmetic_says(of, size):
    model = plain(torch.bfloat16)
    for rank, found in enumerate(of(size, "held")):
        for (stage, precision), components in found.items():
            master, moments = cases.preset(precision)[2:]
            assert components == expected_bytes(model, stage, size, rank, master, moments[0])


def expected_bytes(
    model: torch.nn.Module, stage: int, size: int, rank: int, master: str, moments: str
) -> dict[str, dict[str, int]]:
    """Bytes of weights and states from shapes and formats alone."""
    expected: dict[str, Counter[str]] = defaultdict(Counter)
    for p in model.parameters():
        inner, rows = p[0].numel(), math.ceil(p.shape[0] / size)  # as torch.chunk cuts them
        own = inner * (p.shape[0] if stage == 0 else max(0, min(rows, p.shape[0] - rank * rows)))
        # FSDP2 makes the parts of a weight equally large.
        expected["weights"]["bfloat16"] += 2 * inner * (p.shape[0] if stage < 2 else rows)
        expected["scalars"]["step"] += 4
        weight = MASTER_WEIGHTS[torch.bfloat16][master]
        planes = [("master_weights", plane.name, plane) for plane in weight.planes[1:]]
        for slot in RULES["adamw"].slots:
            format = moment_format(moments, slot.signed, p.shape)
            keys = state_keys(format, slot.name)
            planes += [("moments", *pair) for pair in zip(keys, format.planes, strict=True)]
        for component, key, plane in planes:
            expected[component][key] += own // plane.block * plane.dtype.itemsize
    return {component: dict(planes) for component, planes in expected.items()}


def test_a_model_alone_is_called_the_same_way():
    model = Parallel(torch.nn.Linear(3, 2).bfloat16())
    optimizer = AdamW(list(model.named_parameters()))
    model.attach(optimizer)
    model.backward(model(torch.ones(1, 3).bfloat16()).sum())
    optimizer.step()
    assert [name for name, _ in model.named_parameters()] == ["weight", "bias"]
    assert model.state_dict().keys() == {"weight", "bias"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"zero_stage": 4}, "zero_stage=4: use 0, 1, 2 or 3"),
        (
            {"zero_stage": 1, "cpu_offload": True},
            "cpu_offload=True: needs zero_stage 2 or 3, not 1",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        parallelize(torch.nn.Linear(2, 2), mesh=None, **settings)


@pytest.mark.parametrize("stage", [2, 3])
def test_an_empty_weight_is_refused_by_name_where_it_cannot_be_sharded(stage):
    layers = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Embedding(0, 2))
    message = "parameter '1.weight' is empty, which FSDP2 cannot reduce: use zero_stage 0 or 1"
    with pytest.raises(ValueError, match=message):
        parallelize(layers, stage, mesh=None)

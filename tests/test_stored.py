import pytest
import torch

from halfword import stored
from halfword.formats import FORMATS
from halfword.stored import Stored, adopt, decode_all, make_slot, make_weight, tiles, write_all

SHAPES = [(), (0,), (3, 0, 2), (1,), (7,), (65_537,), (70_000, 3), (2, 3, 70_001), (5, 1, 4)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tiles_cover_every_element_once_in_row_major_order(shape):
    values = torch.arange(max(1, torch.Size(shape).numel()))[: torch.Size(shape).numel()]
    values = values.reshape(shape)
    seen = []
    for start, (tile,) in tiles([values]):
        assert tile.numel() <= stored.TILE
        assert tile.reshape(-1)[0] == start
        seen.append(tile.reshape(-1))
    assert torch.equal(torch.cat(seen) if seen else values.reshape(-1), values.reshape(-1))


def test_tiles_of_other_strides_walk_the_same_boxes():
    logical = torch.arange(300 * 401).reshape(300, 401)
    strided = logical.t().contiguous().t()
    expanded = torch.ones(401).expand(300, 401)
    for start, (a, b, c) in tiles([logical, strided, expanded]):
        assert torch.equal(a, b) and c.shape == a.shape
        assert a.reshape(-1)[0] == start


def test_tiles_write_through_to_strided_tensors():
    target = torch.zeros(401, 300).t()
    values = torch.arange(300 * 401.0).reshape(300, 401)
    write_all(Stored(FORMATS["fp32"], (target,)), values, step=0)
    assert torch.equal(target, values)


@pytest.mark.parametrize("name", ["split", "split24", "bf16", "bf16-sr", "bf16+fp32"])
def test_a_new_master_weight_is_what_the_parameter_shows(name):
    parameter = torch.randn(70_000).bfloat16()
    planes = make_weight(FORMATS[name], parameter)
    weight = Stored(FORMATS[name], (parameter, *planes.values()))
    assert torch.equal(decode_all(weight), parameter.float())


def test_adopting_drops_what_was_below_the_weight():
    parameter = torch.ones(4).bfloat16()
    weight = Stored(FORMATS["split"], (parameter, torch.full((4,), 99, dtype=torch.int16)))
    assert not torch.equal(decode_all(weight), torch.ones(4))
    adopt(weight)
    assert torch.equal(decode_all(weight), torch.ones(4))


def test_states_have_the_shape_strides_and_keys_of_their_format():
    parameter = torch.randn(3, 5).t().bfloat16()
    state = make_slot(FORMATS["bf16-sr"], "exp_avg", parameter)
    assert list(state) == ["exp_avg_bf16"]
    assert state["exp_avg_bf16"].stride() == parameter.stride()
    assert list(make_slot(FORMATS["fp32"], "exp_avg", parameter)) == ["exp_avg"]

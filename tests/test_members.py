"""What a user changes between steps is seen: nothing that is kept outlives it."""

import pickle

import pytest
import torch
from torch.nn import Parameter

from halfword import AdamW
from helpers import same


def make(backend, *shapes, **settings):
    torch.manual_seed(0)
    parameters = [Parameter(torch.randn(shape).bfloat16()) for shape in shapes]
    return parameters, AdamW(parameters, backend=backend, lr=1e-2, **settings)


def step(parameters, opt, seed):
    generator = torch.Generator().manual_seed(seed)
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=generator).bfloat16()
    opt.step()


def transpose(p, opt):
    opt.state[p]["exp_avg"].t_()


def transpose_remainder(p, opt):
    opt.state[p]["remainder"].t_()


def transpose_by_data(p, opt):
    opt.state[p]["exp_avg"].data = opt.state[p]["exp_avg"].data.t()


def new_step_storage(p, opt):
    opt.state[p]["step"].data = torch.tensor(100.0)


def step_in_place(p, opt):
    opt.state[p]["step"].fill_(7)


def edit_identities(p, opt):
    opt.param_groups[0]["identities"][0] = 5


def exchange_names(p, opt):
    state = opt.state[p]
    state["exp_avg"], state["exp_avg_sq"] = state["exp_avg_sq"], state["exp_avg"].abs()


def something_else(p, opt):
    opt.state["mine"] = 3


CHANGES = [
    *(transpose, transpose_remainder, transpose_by_data, new_step_storage, step_in_place),
    *(edit_identities, exchange_names, something_else),
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen_by_the_native_backend_as_by_the_reference(change):
    ends = []
    for backend in ("native", "reference"):
        parameters, opt = make(backend, (8, 8), (8, 8), master_weights="split", moments="fp32")
        for number in range(3):
            step(parameters, opt, number)
            if number == 0:
                change(parameters[0], opt)
        ends.append([x for p in parameters for x in (p.detach(), *opt.state[p].values())])
    assert all(same(a, b) for a, b in zip(*ends, strict=True))
    if change is new_step_storage:
        assert opt.state[parameters[0]]["step"] == 102


def test_nothing_is_written_beyond_a_tensor_that_shrank_where_it_was():
    p = Parameter(torch.zeros(64))
    opt = AdamW([p], backend="native")
    arena = torch.zeros(256)
    state = opt.state[p]["exp_avg"]
    state.data = arena[:64]
    p.grad = torch.ones(64)
    opt.step()
    state.data = arena[:32]
    arena.zero_()
    with pytest.raises(RuntimeError):
        opt.step()
    assert not arena[32:].any()


def test_another_dtype_at_the_same_address_is_seen():
    p = Parameter(torch.zeros(64))
    opt = AdamW([p], backend="native")
    arena = torch.zeros(64)
    state = opt.state[p]["exp_avg"]
    state.data = arena
    p.grad = torch.ones(64)
    opt.step()
    arena.zero_()
    state.data = arena.view(torch.bfloat16)[:64]
    opt.step()
    assert not arena[32:].any(), "32 floats hold the 64 elements that it has now"


def test_a_bad_setting_counts_no_step():
    (p,), opt = make("native", (4, 4))
    p.grad = torch.ones_like(p)
    opt.param_groups[0]["backend"] = "nativ"
    with pytest.raises(ValueError, match="backend='nativ': use one of"):
        opt.step()
    assert opt.state[p]["step"] == 0


def test_a_pickle_holds_each_counter_once():
    sizes = []
    for number in (50, 100):
        parameters = [Parameter(torch.zeros(1)) for _ in range(number)]
        sizes.append(len(pickle.dumps(AdamW(parameters))))
    assert sizes[1] < 2.2 * sizes[0]
    _, opt = make("native", (4, 4), (4, 4))
    again = pickle.loads(pickle.dumps(opt))
    step([p for group in again.param_groups for p in group["params"]], again, 0)
    assert all(state["step"] == 1 for state in again.state.values())

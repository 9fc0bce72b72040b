import torch

from halfword.memory import Peak
from halfword.memory.peak import Event, highest

CPU = torch.device("cpu")


def test_the_peak_is_the_most_that_lived_at_once():
    with Peak(CPU) as peak:
        first = torch.zeros(1000)
        second = torch.zeros(500)
        del first
        third = torch.zeros(300)
    assert peak.components == {"gradients": 0, "transient": 6000}
    del second, third


def test_what_was_there_before_does_not_count():
    before = torch.zeros(1000)
    with Peak(CPU) as peak:
        del before
        after = torch.zeros(10)
    assert sum(peak.components.values()) == 40
    del after


def test_gradients_are_told_apart_where_they_lived_at_the_peak():
    with Peak(CPU) as peak:
        gradient = torch.zeros(100)
        activation = torch.zeros(1000)
        del activation
        late = torch.zeros(50)
        peak.note_gradients([gradient, late])
    assert peak.components == {"gradients": 400, "transient": 4000}


def test_an_address_that_is_handed_out_again_was_free():
    """Threads of a communication library free what the profiler does not see."""
    events = [Event(1, 7, 100), Event(3, 7, 80), Event(2, 9, 30), Event(4, 9, -30)]
    assert highest(events, set()) == {"gradients": 0, "transient": 130}


def test_an_end_without_a_beginning_is_of_what_was_there_before():
    assert highest([Event(1, 5, -100), Event(2, 6, 10)], set()) == {"gradients": 0, "transient": 10}


def test_what_other_threads_freed_is_gone_at_the_entry_of_the_step():
    events = [Event(1, 1, 100), Event(2, 2, 10), Event(3, 3, 4), Event(4, 4, 50)]
    assert highest(events, {(2, 10)}) == {"gradients": 10, "transient": 154}
    assert highest(events, {(2, 10)}, entry=3) == {"gradients": 10, "transient": 100}

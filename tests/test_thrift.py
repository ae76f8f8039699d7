"""What the probe may cost: which steps are recorded, as costs and steps come and go."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from eroica.probe.thrift import LOOK_EVERY, MOST, MOST_WHOLE_NS, SHARE, STEP_HOOKS_NS, Thrift

STEP_NS = 100_000_000


def _after(
    thrift: Thrift,
    looks: int,
    *,
    call_ns: int,
    num_calls: int,
    place_ns: int = 0,
    step_ns: int = STEP_NS,
    first: int = 0,
) -> int:
    """Steps of a loop in which the record of each call costs `call_ns`; returns the last step."""
    step = first
    for _ in range(looks * LOOK_EVERY):
        thrift.placed_ns += place_ns * num_calls
        if step & thrift.mask == 0:
            thrift.recorded_ns += call_ns * num_calls
        step += 1
        if step % LOOK_EVERY == 0:
            thrift.look(step, step * step_ns)
    return step


def test_ten_collectives_in_a_step_of_100_ms_are_recorded_in_every_step() -> None:
    thrift = Thrift()
    step = _after(thrift, 100, call_ns=7_000, place_ns=2_000, num_calls=10)
    assert thrift.one_step_in == 1
    assert thrift.spent_ns / (step * STEP_NS) < SHARE


def test_a_hundred_collectives_are_recorded_in_so_many_steps_that_all_hooks_cost_less_than_the_limit() -> None:
    thrift = Thrift()
    step = _after(thrift, 100, call_ns=10_000, place_ns=500, num_calls=100)
    assert thrift.one_step_in == 32
    before = thrift.spent_ns
    last = _after(thrift, 100, call_ns=10_000, place_ns=500, num_calls=100, first=step)
    assert (thrift.spent_ns - before) / ((last - step) * STEP_NS) < SHARE


def test_where_positions_alone_cost_more_fewer_records_are_no_help_and_are_not_tried_for_ever() -> None:
    thrift = Thrift()
    _after(thrift, 300, call_ns=10_000, place_ns=2_000, num_calls=1_000)
    assert thrift.one_step_in == 64


def test_steps_that_grow_cheap_again_are_recorded_again() -> None:
    thrift = Thrift()
    step = _after(thrift, 100, call_ns=10_000, num_calls=1_000)
    assert thrift.one_step_in > 64
    _after(thrift, 900, call_ns=10_000, num_calls=1, first=step)
    assert thrift.one_step_in == 1


def test_the_first_look_after_a_warm_up_changes_nothing() -> None:
    thrift = Thrift()
    thrift.recorded_ns = 10**9
    assert thrift.look(LOOK_EVERY, 10**9) is False and thrift.one_step_in == 1
    assert thrift.look(2 * LOOK_EVERY, 10**9 + LOOK_EVERY * STEP_NS) is False
    assert thrift.spent_ns == 10**9 + LOOK_EVERY * STEP_HOOKS_NS


@given(st.lists(st.tuples(st.integers(-5, 400), st.integers(-(10**6), 10**10), st.integers(0, 10**9)), max_size=60))
def test_whatever_comes_the_recorded_steps_of_two_ranks_are_the_same_or_a_part(
    looks: list[tuple[int, int, int]],
) -> None:
    one, other = Thrift(), Thrift()
    step = now_ns = 0
    for index, (steps, passed_ns, spent_ns) in enumerate(looks):
        step, now_ns = step + steps, now_ns + passed_ns
        one.recorded_ns += spent_ns
        other.recorded_ns += spent_ns if index % 2 else 0
        other.placed_ns += spent_ns // 7
        one.look(step, now_ns)
        other.look(step, now_ns)
        assert 1 <= one.one_step_in <= MOST
        more, fewer = sorted((one, other), key=lambda thrift: thrift.one_step_in)
        for each in range(step, step + 2 * LOOK_EVERY):
            assert each & more.mask == 0 or each & fewer.mask != 0


def test_in_a_window_all_steps_are_recorded_and_what_that_costs_changes_nothing() -> None:
    thrift = Thrift()
    step = _after(thrift, 100, call_ns=10_000, num_calls=100)
    usual = thrift.one_step_in
    assert usual > 1
    thrift.begin_window(step * STEP_NS)
    step = _after(thrift, 4, call_ns=1_000_000, num_calls=100, first=step)
    assert (thrift.mask, thrift.one_step_in) == (0, usual)
    thrift.end_window()
    assert thrift.mask == usual - 1
    _after(thrift, 100, call_ns=10_000, num_calls=100, first=step)
    assert thrift.one_step_in == usual


def test_a_window_whose_end_is_never_told_is_over_at_some_time() -> None:
    thrift = Thrift()
    step = _after(thrift, 100, call_ns=10_000, num_calls=100)
    thrift.begin_window(step * STEP_NS)
    _after(thrift, MOST_WHOLE_NS // STEP_NS // LOOK_EVERY + 2, call_ns=10_000, num_calls=100, first=step)
    assert thrift.mask > 0

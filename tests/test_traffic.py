"""Bytes that are reduced between two optimizer steps, by the records of a ring."""

from __future__ import annotations

from eroica.ring import COLLECTIVE, OPS, STEP, Record
from eroica.traffic import Traffic

REDUCE, GATHER = OPS.index("allreduce"), OPS.index("allgather")


def reduction(number: int, step: int, at: int, num_bytes: int, op: int = REDUCE) -> Record:
    return Record(number, at, 1, False, COLLECTIVE, op, 1, 0, -1, 7, number, num_bytes, step)


def steps(num: int, inside: bool = False) -> Traffic:
    """Each step reduces twice 100 bytes, and gathers; `inside`: while the optimizer steps."""
    traffic = Traffic()
    number = 0
    for step in range(num):
        begin = 1000 * step
        at = begin + 900 if inside else begin
        calls = []
        for k, (num_bytes, op) in enumerate([(100, REDUCE), (100, REDUCE), (5000, GATHER)]):
            number += 1
            calls.append(reduction(number, step, at + k, num_bytes, op))
        number += 1
        stepped = Record(number, begin + 800, 150, False, STEP, 0, 0, 0, -1, 1, step + 1, 0, step)
        traffic.feed(calls, [*calls, stepped])
    return traffic


def test_sums_over_ranks_count_and_gathers_do_not() -> None:
    assert steps(10).num_bytes() == 200


def test_what_a_closure_reduces_within_a_step_does_not_count() -> None:
    assert steps(10, inside=True).num_bytes() == 0


def test_few_steps_tell_nothing() -> None:
    assert steps(4).num_bytes() == 0 and Traffic().num_bytes() == 0

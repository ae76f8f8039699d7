"""Groups of two or four besides the whole. Some steps ago one rank called an all-reduce on a group that it does not
belong to, which did nothing. On its own group it is a call behind, so its partners wait there for a rank that waits
for them in a call of all."""

from __future__ import annotations

from eroica.standing import Frame
from evals import halted
from evals.catalogue import Case
from evals.halted import COMPLETED, STARTED, Entered
from evals.made import Draw, Made


def make(case: Case, draw: Draw) -> Made:
    """In each step a call on the group of few, then one of all."""
    chance = draw.random()
    size, few = 8, chance.choice((2, 4))
    culprit, line, step = chance.randrange(size), chance.randint(20, 300), chance.randint(2, 60)
    op = "all_reduce" if draw.shape == "recorder" else "allreduce"
    views = []
    for rank in range(size):
        base = rank - rank % few
        groups = {"default_pg": range(size), "tensor": range(base, base + few)}
        is_partner = rank != culprit and base == culprit - culprit % few
        calls = []
        for number in range(1, step + 1):
            calls.append(Entered("tensor", number, op, elements=1 << 12, step=number - 1))
            calls.append(Entered("default_pg", number, op, elements=1 << 20, step=number - 1))
        if rank != culprit:
            calls.append(Entered("tensor", step + 1, op, STARTED if is_partner else COMPLETED, 1 << 12, step))
        if not is_partner:
            calls.append(Entered("default_pg", step + 1, op, STARTED, 1 << 20, step))
        at = Frame("average", "/home/u/model.py", line, "work.wait()")
        if not is_partner:
            at = Frame("reduce_gradients", "/home/u/train.py", line + 40, "work.wait()")
        views.append(halted.view(rank, "node0", groups, calls, halted.thread(at), by=draw.shape, num_steps=step))
    return halted.judged(case, views, [culprit])

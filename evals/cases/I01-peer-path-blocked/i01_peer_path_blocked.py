"""The first large transfer between two GPUs of a host: both ranks have entered the same call of their pair, its kernel
has started on both and never ends. The other pairs are through and wait for these two in a call of all."""

from __future__ import annotations

from eroica.standing import Frame
from evals import halted
from evals.catalogue import Case
from evals.halted import Entered
from evals.made import Draw, Made


def make(case: Case, draw: Draw) -> Made:
    """Tensor-parallel pairs within data parallelism."""
    chance = draw.random()
    num_hosts = chance.choice((1, 2))
    size = 8 * num_hosts
    first = 2 * chance.randrange(size // 2)
    op = "all_reduce" if draw.shape == "recorder" else "allreduce"
    line = chance.randint(20, 300)
    views = []
    for rank in range(size):
        pair = (rank - rank % 2, rank - rank % 2 + 1)
        groups = {"default_pg": range(size), "tensor": pair}
        is_stuck = rank in (first, first + 1)
        calls = [Entered("default_pg", 1, op, elements=1)]
        calls += [Entered("tensor", 1, op, halted.STARTED if is_stuck else halted.COMPLETED, elements=1 << 24)]
        if not is_stuck:
            calls += [Entered("default_pg", 2, op, halted.STARTED, elements=1 << 22)]
        at = Frame("forward", "/home/u/model.py", line, "torch.cuda.synchronize()")
        if not is_stuck:
            at = Frame("reduce_gradients", "/home/u/train.py", line + 7, "work.wait()")
        main = halted.thread(halted.SYNCHRONIZE, at) if is_stuck else halted.thread(at)
        views.append(halted.view(rank, f"node{rank // 8}", groups, calls, main, by=draw.shape))
    return halted.judged(case, views, (first, first + 1))

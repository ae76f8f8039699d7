"""All ranks stand in a synchronisation behind two or three collectives on as many groups, entered in one order with
equal numbers by everybody, and none of them ends."""

from __future__ import annotations

from eroica.standing import Frame
from evals import halted
from evals.catalogue import Case
from evals.halted import Entered
from evals.made import Draw, Made


def make(case: Case, draw: Draw) -> Made:
    """Groups of all ranks, used on streams of their own."""
    chance = draw.random()
    size, num_groups, step = chance.choice((8, 16)), chance.choice((2, 3)), chance.randint(3, 90)
    names = ["default_pg", "experts", "context"][:num_groups]
    groups = {name: range(size) for name in names}
    ops = {name: chance.choice(("all_reduce", "reduce_scatter", "all_gather")) for name in names}
    ops = {name: op.replace("all_", "all") if draw.shape == "ring" else op for name, op in ops.items()}
    calls = [
        Entered(name, number, ops[name], elements=1 << (16 + at), step=number - 1)
        for number in range(1, step + 1)
        for at, name in enumerate(names)
    ]
    calls += [
        Entered(name, step + 1, ops[name], halted.STARTED, elements=1 << (16 + at), step=step)
        for at, name in enumerate(names)
    ]
    users = Frame("clip_gradients", "/home/u/train.py", chance.randint(20, 300), "torch.cuda.synchronize()")
    views = [
        halted.view(
            rank, f"node{rank // 8}", groups, calls, halted.thread(halted.SYNCHRONIZE, users), by=draw.shape,
            num_steps=step,
        )
        for rank in range(size)
    ]  # fmt: skip
    return halted.judged(case, views, range(size))

"""All ranks leave by the same assertion, each in its own number of parameters: those of the bucket all have their
gradients, and no reduction was begun. Some have gone when they are looked at, some are on their way out."""

from __future__ import annotations

from dataclasses import replace

from eroica.standing import Frame
from evals import halted
from evals.catalogue import Case
from evals.halted import Entered
from evals.made import Draw, Made


def make(case: Case, draw: Draw) -> Made:
    """Data parallelism with buckets under gradient accumulation."""
    chance = draw.random()
    size, step = chance.choice((4, 8, 16)), chance.randint(1, 3)
    file = f"/home/u/megatron/core/distributed/param_and_grad_buffer.py:{chance.randint(300, 420)}"
    views = []
    for rank in range(size):
        count = chance.choice((48, 52))
        calls = [Entered("default_pg", number, "allreduce", step=number - 1) for number in range(1, step + 1)]
        is_gone = draw.shape == "over" or chance.random() < 0.3
        leaving = halted.thread(
            Frame("destroy_process_group", halted.C10D, 2250), Frame("main", "/home/u/pretrain.py", 210)
        )
        main = None if is_gone else leaving
        seen = halted.view(
            rank, f"node{rank // 8}", {"default_pg": range(size)}, calls, main, by="ring", silent_s=3.0, num_steps=step
        )
        views.append(
            replace(
                seen,
                state="died" if is_gone else "running",
                exit_status=1 if is_gone else None,
                silent_s=None if is_gone else 3.0,
                exception="AssertionError: Communication call has not been issued for this bucket "
                f"({count}/{count} params have grad available)",
                exception_at=file,
            )
        )
    return halted.judged(case, views, range(size))

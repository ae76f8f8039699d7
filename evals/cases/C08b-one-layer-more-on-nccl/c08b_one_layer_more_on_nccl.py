"""At the construction of DistributedDataParallel parameters are broadcast in buckets. One rank has a layer more, hence
a bucket of another size; rank 0, the source, is through and waits in the first backward pass."""

from __future__ import annotations

from eroica.standing import Frame
from evals import halted
from evals.catalogue import Case
from evals.halted import COMPLETED, STARTED, Entered
from evals.made import Draw, Made
from evals.truth import Place


def make(case: Case, draw: Draw) -> Made:
    """All ranks in one group."""
    chance = draw.random()
    size = chance.choice((4, 8, 16))
    culprit, line, bucket = chance.randrange(1, size), chance.randint(20, 300), chance.randint(2, 5)
    layer = chance.choice((1 << 10, 1 << 20))
    reduce = "all_reduce" if draw.shape == "recorder" else "allreduce"
    ddp = f"{halted.TORCH}/nn/parallel/distributed.py"
    views = []
    for rank in range(size):
        calls = [Entered("default_pg", number, "broadcast", elements=1 << 22) for number in range(1, bucket)]
        elements = (1 << 21) + (layer if rank == culprit else 0)
        calls.append(Entered("default_pg", bucket, "broadcast", COMPLETED if rank == 0 else STARTED, elements))
        if rank == 0:
            calls.append(Entered("default_pg", bucket + 1, reduce, STARTED, 1 << 22))
            main = halted.thread(
                Frame("_engine_run_backward", f"{halted.TORCH}/autograd/graph.py", 824),
                Frame("backward", f"{halted.TORCH}/_tensor.py", 648),
                Frame("train", "/home/u/train.py", line + 30, "loss.backward()"),
            )
        else:
            main = halted.thread(
                Frame("_sync_module_states", f"{halted.TORCH}/distributed/utils.py", 311),
                Frame("__init__", ddp, 1066),
                Frame("build", "/home/u/train.py", line, "model = DistributedDataParallel(net)"),
            )
        views.append(halted.view(rank, f"node{rank // 8}", {"default_pg": range(size)}, calls, main, by=draw.shape))
    return halted.judged(case, views, [culprit], [Place(file="train.py", first=line, last=line)])

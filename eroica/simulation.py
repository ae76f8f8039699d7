"""Simulated trainings as the product sees real ones: a run on the fabric model made into the summaries of its ranks.

The simulator knows what happened; `summaries` tells only what ledgers of real ranks would, samples and all, so that
`scaling` can be tried on jobs whose truth is known. Used by `eroica simulate`, the taxonomy bench and tests.
"""

from __future__ import annotations

import numpy as np

from eroica.collectives import Channel, Ledger, sample
from eroica.communication import CollectiveKind
from eroica.critical_path import NUM_ACTIVITIES, Activity
from eroica.fabric.simulator import Run
from eroica.job import ProcessGroup, format_ranks
from eroica.pattern import Coverage, Function, Patterns, Summary

TRAINING = Function(Activity.COMPUTE, "training", None, None)
"""The model does not tell functions apart."""
_ELEMENTS = 1 << 20
"""Work of a task of the usual size, in whatever a kernel's grid counts."""


def summaries(run: Run) -> list[Summary]:
    """One summary for each rank, of the iterations that the run has in detail (64 at most are told one by one)."""
    setting = run.job.setting
    work, gpus = setting.workload, setting.host.gpus
    count, ranks, buckets = run.enter_s.shape
    groups = [
        ProcessGroup(str(n), "default_pg" if len(run.job.groups) == 1 else "mesh_dp", tuple(g.ranks.tolist()), 0)
        for n, g in enumerate(run.job.groups)
    ]
    channels = [Channel(format_ranks(g.ranks), g.description, len(g.ranks)) for g in groups]
    of = run.job.group_of
    done = run.done_s[:, of, :].astype(np.float64)
    enter = run.enter_s.astype(np.float64)
    computed = run.compute_s.astype(np.float64)
    exposed = np.maximum(done - np.maximum(enter, computed[:, :, None]), 0.0)
    own = computed + work.optimizer_s
    length = run.length_s[len(run.length_s) - count :]
    first = len(run.length_s) - count
    steps = np.arange(first, first + count)
    step, position = np.repeat(steps, buckets), np.tile(np.arange(buckets, dtype=np.int32), count)
    usual, usual_work = np.median(own, axis=0), np.median(run.work, axis=0)
    rise = np.maximum(own - usual, 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        by_work = np.clip((run.work / usual_work - 1) * usual / rise, 0.0, 1.0)
    by_work = np.where(rise > 0, by_work, np.nan)
    told = []
    for r in range(ranks):
        chosen, complete = sample(step, np.zeros(len(step), np.int32), position, [channels[of[r]]])
        entered = np.diff(run.ready_s[:, r, :].astype(np.float64), axis=1, prepend=0.0).ravel()
        rows = int(chosen.sum())
        group = groups[of[r]]
        ledger = Ledger(
            steps=steps.astype(np.int64),
            length_s=length.astype(np.float32),
            own_s=own[:, r].astype(np.float32),
            exposed_s=exposed[:, r].sum(axis=1).astype(np.float32),
            waiting_s=np.zeros(count, np.float32),
            top_function=np.where(rise[:, r] > 0, 0, -1).astype(np.int32),
            top_excess_s=rise[:, r].astype(np.float32),
            top_by_work=by_work[:, r].astype(np.float32),
            channels=(channels[of[r]],),
            channel_count=np.array([buckets], np.float32),
            channel_exposed_s=np.array([exposed[:, r].sum() / count], np.float32),
            channel_bytes=np.array([work.gradient_bytes / (gpus if work.layout == "tensor" else 1)]),
            step=step[chosen].astype(np.int64),
            channel=np.zeros(rows, np.int32),
            position=position[chosen],
            kind=np.full(rows, CollectiveKind.ALL_REDUCE, np.uint8),
            check=np.full(rows, 1, np.int64),
            work_before_s=entered[chosen].astype(np.float32),
            duration_s=(done - enter)[:, r].ravel()[chosen].astype(np.float32),
            sample_exposed_s=exposed[:, r].ravel()[chosen].astype(np.float32),
            in_flight=np.zeros(rows, np.int32),
            complete_steps=complete,
        )
        window_s = float(length.sum())
        beta = np.zeros(NUM_ACTIVITIES, np.float32)
        beta[Activity.COMPUTE] = own[:, r].sum() / window_s
        told.append(
            Summary(
                rank=r,
                world_size=ranks,
                host=f"host{r // gpus:04d}",
                device_model="",
                groups=(ProcessGroup(group.name, group.description, group.ranks, len(group.ranks)),),
                steps_by="ProfilerStep",
                window_s=window_s,
                started_ns=None,
                num_iterations=count,
                patterns=Patterns(
                    functions=(TRAINING,),
                    beta=beta[[Activity.COMPUTE]],
                    mu=np.full(1, np.nan, np.float32),
                    sigma=np.full(1, np.nan, np.float32),
                    mu_source=np.zeros(1, np.uint8),
                    count=np.ones(1, np.float32),
                    work=np.array([float(run.work[:, r].mean()) * _ELEMENTS]),
                    cutoff=0.0,
                    activity_beta=beta,
                    threads=(),
                ),
                ledger=ledger,
                coverage=Coverage(
                    num_events=count,
                    num_kernels=count,
                    num_launches=count,
                    num_collectives=count * buckets,
                    explained=1.0,
                    has_device=True,
                    partial=False,
                    epoch=False,
                    notes=(),
                ),
            )
        )
    return told

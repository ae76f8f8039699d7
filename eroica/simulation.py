"""Simulated trainings as the product sees real ones: as summaries of ranks, and under the policy that paces them.

The simulator knows what happened; `summaries` tells only what ledgers of real ranks would, samples and all, so that
`scaling` can be tried on jobs whose truth is known. `by_policy` puts the policy in charge of a simulated job, with its
trials; `at_all_times` holds early ranks whatever that gives. Used by `gains`, the benches and tests.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from itertools import pairwise

import numpy as np

from eroica.collectives import Channel, Ledger, sample
from eroica.communication import CollectiveKind
from eroica.critical_path import NUM_ACTIVITIES, Activity
from eroica.fabric.pacing import HARD_CAP_S, Limits, Order, Pacer, Seen, holds
from eroica.fabric.parameters import Setting
from eroica.fabric.simulator import Passage, Run, Steer, Steering
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


# ---- pacing


def alone(setting: Setting, mode: str) -> Setting:
    """The setting with one failure mode and no other, by the names of `scaling.Part`; "nothing" for none."""
    noise = replace(
        setting.noise,
        stalls=setting.noise.stalls if mode == "synchronisation" else None,
        background=setting.noise.background if mode == "contention" else None,
        imbalance=0.1 if mode == "imbalance" else 0.0,
        straggler=setting.ranks // 2 if mode == "straggler" else None,
    )
    host = replace(setting.host, far_slots=tuple(range(setting.host.gpus // 2)) if mode == "locality" else ())
    ample = replace(setting.fabric, oversubscription=1.0, packed=True, spread=True)
    return replace(setting, noise=noise, host=host, fabric=setting.fabric if mode == "contention" else ample)


def _names(setting: Setting) -> list[str]:
    return [f"g{n}" for n in range(setting.host.gpus if setting.workload.layout == "tensor" else 1)]


def sharing(setting: Setting) -> list[tuple[str, ...]]:
    """Groups that share upper links go in turns, as many abreast as can fill these: their own cards bound them."""
    names, fabric = _names(setting), setting.fabric
    abreast = max(1, round(len(names) / fabric.oversubscription))
    if fabric.by_rail or setting.hosts <= fabric.hosts_per_leaf or abreast >= len(names):
        return []
    return [tuple(names[n::abreast]) for n in range(abreast) if len(names[n::abreast]) > 1]


def _rows(setting: Setting, g: int) -> slice:
    """Ranks of a group."""
    return slice(g, None, setting.host.gpus) if setting.workload.layout == "tensor" else slice(None)


def _seen(setting: Setting, passage: Passage) -> Seen:
    """What the ring records of an iteration would show of its waits, holds taken out."""
    waits, begun = {}, {}
    for g, name in enumerate(_names(setting)):
        # Without a hold a rank enters when it is ready, and the reduction before is done.
        before = np.concatenate([[0.0], passage.done_s[g, :-1]])
        entered = np.maximum(passage.ready_s[_rows(setting, g)], before)
        last = np.broadcast_to(entered.max(axis=0), entered.shape)
        waits[name], begun[name] = last - entered, last
    return Seen(passage.step, passage.length_s, waits, begun)


def _steering(setting: Setting, order: Order, limits: Limits) -> Steering:
    """What ranks make of an order that they have just received."""
    names, buckets = _names(setting), setting.workload.buckets
    delay, until = np.zeros((setting.ranks, buckets)), np.zeros((len(names), buckets))
    for g, name in enumerate(names):
        held = delay[_rows(setting, g)]
        told = order.not_before_s.get(name, ())
        until[g, : len(told)] = told
        for b in range(min(buckets, len(told))):
            for member in range(len(held)):
                # Of who comes so early that the moment cuts nothing: it does when the rank comes.
                held[member, b] = order.delay_of(
                    name, member, b, age_s=0.0, cap_s=limits.max_delay_s, since_s=-HARD_CAP_S
                )
    after = np.array([names.index(order.after[n]) if n in order.after else -1 for n in names])
    if order.dry_run:
        after[:] = -1
    return Steering(delay, after, order.patience_s, until)


def by_policy(setting: Setting, pacer: Pacer) -> Steer:
    """The policy in charge: its orders reach all ranks at once, and end by their time to live."""
    clock_s, received_s = 0.0, 0.0
    order: Order | None = None
    steering: Steering | None = None

    def steer(passage: Passage) -> Steering | None:
        nonlocal clock_s, received_s, order, steering
        clock_s += passage.length_s
        sent = pacer.observe(_seen(setting, passage), clock_s)
        if sent is not None:
            order, received_s = sent, clock_s
            steering = _steering(setting, sent, pacer.limits) if sent.delay_s or sent.after else None
        elif order is not None and clock_s - received_s > order.ttl_s:
            order = steering = None
        return steering

    return steer


REFRESH = 10
"""Iterations for which moments stand in a job that is held at all times."""


def at_all_times(setting: Setting, limits: Limits) -> Steer:
    """Every early rank held until the last one usually comes, groups in turn, whatever that gives."""
    recent: deque[Seen] = deque(maxlen=limits.memory)
    lengths: deque[float] = deque(maxlen=limits.memory)
    chains = sharing(setting) if limits.orders_groups else []
    after = {b: a for chain in chains for a, b in pairwise(chain)}
    steering: Steering | None = None

    def steer(passage: Passage) -> Steering | None:
        nonlocal steering
        recent.append(_seen(setting, passage))
        lengths.append(passage.length_s)
        if len(recent) == limits.memory and passage.step % REFRESH == 0:
            usual_s = float(np.median(lengths))
            delays, until = holds(recent, limits, usual_s)
            patience_s = min(limits.max_delay_s, limits.iteration_share * usual_s)
            order = Order(passage.step, 0.0, limits.ttl_s, delays, after, patience_s, not_before_s=until)
            steering = _steering(setting, order, limits)
        return steering

    return steer

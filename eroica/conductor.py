"""Pacing of a live job: joins what ranks tell of their arrivals, asks the policy, and sends what it orders.

A state machine as the coordinator is: messages and the time go in, messages and moments of a history come out. The
policy itself (what is tried, what is proved, when it is given up) is `fabric.pacing`; here is what it needs of a job
that runs. Iterations count only where ranks have really been held, or not, as the policy has it: an order takes a few
iterations to arrive, and a trial that counted those would compare nothing. While a window is taken, or ranks are looked
at, nobody is held: what is diagnosed is the job and not what we do to it. In a rehearsal (dry run) nothing is sent.

One per job, owned by its `Investigation`; `api` and `live` set what it may do. What a rank claims reaches others within
the bounds of the policy, of `holds` and of the gate alone.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from statistics import median, median_low

import numpy as np

from eroica import bus
from eroica.answers import PacedGroup, Pacing, PacingChange
from eroica.arrivals import Arrival
from eroica.fabric.pacing import HARD_CAP_S, LEAST_S, Float64s, Limits, Order, Pacer, Phase, Seen, dispersion
from eroica.holds import MOST_DELAY_NS, MOST_GROUPS
from eroica.topology import Topology

MOST_OPEN = 200
"""Steps that wait for the last of their ranks."""
MOST_RANKS = 4096
"""Of a job that can be paced: an order has a number for each, and goes to all agents."""
MOST_KNOWN = 1024
"""Groups, whatever ranks claim."""
MOST_CHANGES = 100
STRAYS = 200
"""Iterations in a row in which ranks were not held as ordered: something keeps them from it (a profiler of the user's,
an agent that is away), and pacing goes to rest."""
MOST_MOMENT_NS = 3600 * 10**9
"""Ranks may claim any; holds are bounded by their delays anyway."""
SETTLES = 8
"""Joined iterations before the policy begins: groups are known by then, and those of the first steps are of warm-up."""
RECENT = 20
"""Of these the medians are told."""


class Mode(StrEnum):
    """What the conductor may do."""

    OFF = "off"
    DRY_RUN = "dry-run"
    """Say what would be done."""
    ENABLE = "enable"
    """Try it, and keep it where a trial shows a gain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The job, as its coordinator sees it."""

    start: tuple[int, int]
    """Of a training: another one is another job to pace."""
    host_of: Mapping[int, str]
    """Of each rank that lives and is heard."""
    is_free: bool
    """Nothing is captured or looked at, and the job is not being ended."""


@dataclass(slots=True)
class _Group:
    """A process group whose members are known."""

    name: str
    members: tuple[int, ...]
    """Ascending: rows of the policy's tables."""
    transfers: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    waits: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    """Median over the members, per iteration; both in seconds."""


class Conductor:
    """See the module."""

    def __init__(
        self,
        publish: Callable[[bus.Message], None],
        told: Callable[[PacingChange], None] = lambda change: None,
        now: Callable[[], str] = lambda: "",
        topology: Topology | None = None,
    ) -> None:
        """`told` gets each change, for the audit log; `now`: the time, as records have it."""
        self.mode = Mode.OFF
        self.limits = Limits()
        self.has_rehearsed = False
        """A dry run has seen enough of this job to say what it would do."""
        self._publish = publish
        self._told = told
        self._now = now
        self._topology = topology
        self._who = ""
        self._view = View(start=(0, 0), host_of={}, is_free=False)
        self._changes: deque[PacingChange] = deque(maxlen=MOST_CHANGES)
        self._number = 0
        self._asked_ns: int | None = None
        self._has_held = False
        """Somebody was held since the last window."""
        self._forget()

    def _forget(self) -> None:
        """Of the ranks that were."""
        self._pacer: Pacer | None = None
        self._num_told = 0
        self._open: dict[int, dict[int, Arrival]] = {}
        self._last_step = -1
        self._num_joined = 0
        self._sizes: dict[int, bus.Met] = {}
        self._groups: dict[int, _Group] = {}
        self._order: Order | None = None
        self._order_ns = 0
        self._sent: dict[int, dict[int, int]] = {}
        """What ranks are asked for now, by rank and group."""
        self._moments: dict[int, int] = {}
        """And until when at most in their own steps, by group."""
        self._wanted: set[int] = set()
        """Ranks that the policy wants held, whether they are or not."""
        self._strays = 0
        self._spread: deque[float] = deque(maxlen=RECENT)
        self._lengths: deque[float] = deque(maxlen=RECENT)
        self._strides: deque[int] = deque(maxlen=RECENT)
        """Steps of optimizers in an iteration: ranks are held in each of them."""

    def wish(self, mode: Mode, limits: Limits, who: str, now_ns: int) -> None:
        """Somebody says what is to be done from now on."""
        self._release()
        self._forget()
        self.mode, self._who = mode, who
        self.limits = replace(limits, dry_run=mode is Mode.DRY_RUN)
        self._asked_ns = None
        wishes = {Mode.OFF: "switched off", Mode.DRY_RUN: "a dry run begins", Mode.ENABLE: "switched on"}
        self._change(0, "", f"{wishes[mode]} by {who}")

    def handle(self, message: bus.Arrived, now_ns: int) -> None:
        """Iterations of one rank."""
        if self.mode is Mode.OFF or message.rank not in self._view.host_of:
            return
        for met in message.groups[: MOST_KNOWN - len(self._sizes)]:
            self._sizes[met.group] = met
        for arrival in message.arrivals:
            if arrival.step <= self._last_step:
                continue
            ranks = self._open.setdefault(arrival.step, {})
            ranks[message.rank] = arrival
            if len(ranks) >= len(self._view.host_of):
                if self._last_step >= 0:
                    self._strides.append(arrival.step - self._last_step)
                self._last_step = arrival.step
                self._open = {step: told for step, told in self._open.items() if step > arrival.step}
                self._joined(arrival.step, ranks, now_ns)
        for step in sorted(self._open)[:-MOST_OPEN]:
            del self._open[step]

    def tick(self, view: View, now_ns: int) -> None:
        """Let time pass; to be called each round while `mode` is not off."""
        was_free = self._view.is_free
        if view.start != self._view.start or view.host_of.keys() != self._view.host_of.keys():
            is_new = view.start != self._view.start or view.host_of.keys() - self._view.host_of.keys()
            if self._pacer is not None and is_new and view.host_of:  # else ranks are ending
                self._change(self._last_step, "", "the ranks of the job have changed: everything is learnt anew")
            self._release()
            self._forget()
        self._view = view
        if self.mode is Mode.OFF:
            return
        if len(view.host_of) > MOST_RANKS:
            self.mode = Mode.OFF
            self._change(0, "", f"switched off: the job has {len(view.host_of)} ranks, and {MOST_RANKS} can be paced")
            return
        if not view.is_free:
            self._release()
        elif not was_free and self._order is not None and self._pacer is not None and self._pacer.is_paced:
            self._send(self._order, now_ns)
        if self._sent and now_ns - self._order_ns >= self.limits.ttl_s * 1e9:
            self._sent = {}  # ended by itself
        ttl_ns = round(self.limits.ttl_s * 1e9)
        if self._asked_ns is None or now_ns - self._asked_ns >= ttl_ns / 2:
            self._asked_ns = now_ns
            self._publish(bus.TellArrivals(ttl_s=self.limits.ttl_s))

    def note(self) -> str:
        """For the diagnosis of a window: what pacing had to do with the job before it; "" if nothing."""
        had, self._has_held = self._has_held or bool(self._sent), False
        if not had:
            return ""
        return "ranks were held back by eroica's pacing before this window; while it was taken nobody was"

    def note_of_look(self) -> str:
        """The same for the diagnosis of a look. Another look may follow, and is told as well."""
        if not self._has_held:
            return ""
        return "ranks were held back by eroica's pacing before they were looked at; since then nobody is"

    def state(self, job: str) -> Pacing:
        """As it is answered."""
        pacer = self._pacer
        verdict = pacer.verdicts[-1] if pacer is not None and pacer.verdicts else None
        return Pacing(
            job=job,
            mode=self.mode,
            phase=pacer.phase if pacer is not None else "",
            is_held=bool(self._sent),
            would_hold=pacer is not None and pacer.is_paced and self.mode is Mode.DRY_RUN,
            has_rehearsed=self.has_rehearsed,
            threshold=self.limits.threshold,
            max_delay_s=self.limits.max_delay_s,
            ttl_s=self.limits.ttl_s,
            group_caps_s=dict(self.limits.group_caps_s),
            who=self._who,
            num_iterations=self._num_joined,
            iteration_s=median(self._lengths) if self._lengths else None,
            dispersion=median(self._spread) if self._spread else None,
            gain=verdict.gain if verdict is not None else None,
            gain_error=verdict.gain_error if verdict is not None else None,
            steadier=verdict.steadier if verdict is not None else None,
            groups=[self._group_state(key, group) for key, group in sorted(self._groups.items())],
            changes=list(self._changes),
            why_not=self._why_not(),
        )

    def _group_state(self, key: int, group: _Group) -> PacedGroup:
        planned = self._delays(self._order) if self._order is not None else {}
        delays = [planned.get(rank, {}).get(key, 0) / 1e9 for rank in group.members]
        return PacedGroup(
            name=group.name,
            num_ranks=len(group.members),
            wait_s=median(group.waits) if group.waits else None,
            longest_delay_s=max(delays),
            median_delay_s=median(delays),
        )

    def _why_not(self) -> str:
        """Why nothing comes of it, where that is known."""
        if self.mode is Mode.OFF:
            return ""
        if not self._view.host_of:
            return "no rank of the job is alive and heard"
        if not self._num_told:
            return "no iteration was joined over all ranks yet; it takes steps of an optimizer and collectives"
        if self._num_told > SETTLES and not self._num_joined:
            return "the ends of collectives are not seen (as on NCCL), so that nobody knows who waits"
        return ""

    def _joined(self, step: int, told: Mapping[int, Arrival], now_ns: int) -> None:
        """An iteration of all ranks."""
        self._num_told += 1
        waits, begun = self._waits(told)
        # The lower of two: in the middle between them, one that lies would lengthen the other's share of holds.
        length_s = median_low(arrival.length_ns for arrival in told.values()) / 1e9
        seen = Seen(step, length_s, waits, begun)
        if not self._groups or not self._view.is_free:
            return
        self._num_joined += 1
        if self._pacer is None:
            if self._num_joined >= SETTLES:
                self._pacer = Pacer(self.limits, sharing=self._sharing())
            return
        held = {rank for rank, arrival in told.items() if arrival.held_ns > 0}
        if not self._is_as_ordered(told, held):
            self._strays += 1
            if self._order is not None and now_ns - self._order_ns >= self.limits.ttl_s * 5e8:
                self._send(self._order, now_ns)
            if self._strays >= STRAYS:
                self._strays = 0
                self._take(self._pacer, self._pacer.off(step, "ranks are not held as ordered", now_ns / 1e9), now_ns)
            return
        self._strays = 0
        if waits and not held:
            self._spread.append(dispersion(seen))
        self._lengths.append(seen.length_s)
        self._take(self._pacer, self._pacer.observe(seen, now_ns / 1e9), now_ns)
        if self.mode is Mode.DRY_RUN and len(self._spread) >= min(self.limits.memory, RECENT):
            self.has_rehearsed = True

    def _take(self, pacer: Pacer, order: Order | None, now_ns: int) -> None:
        """What the policy has decided."""
        for change in pacer.changes:
            self._change(change.step, change.phase, change.why)
        pacer.changes.clear()
        if order is not None:
            self._order = order
            self._send(order, now_ns)

    def _is_as_ordered(self, told: Mapping[int, Arrival], held: set[int]) -> bool:
        """Ranks were held, or were not, as the policy has it. Until a moment only those are that come before it, and
        nobody where all come later: to leave those iterations out would leave out slow ones of the paced alone."""
        if not self._wanted or not (held or self._sent):
            return not self._wanted and not held
        for rank in self._wanted - held:
            came = {first[0]: since for first, since in zip(told[rank].firsts, told[rank].entered_ns, strict=False)}
            for key in self._sent.get(rank, {}):
                moment_ns, since_ns = self._moments.get(key), came.get(key, -1)
                # When it came may not be recorded; that the order has come then takes others who were held.
                if moment_ns is None or (since_ns < 0 and not held) or 0 <= since_ns < moment_ns - LEAST_S * 1e9:
                    return False
        return True

    def _waits(self, told: Mapping[int, Arrival]) -> tuple[dict[str, Float64s], dict[str, Float64s]]:
        """Group -> what each member waited for the last one: its duration less the shortest. And when the last one came
        by each member's own time, where members can tell."""
        by_group: dict[int, dict[int, tuple[int, int, int]]] = {}
        for rank, arrival in told.items():
            entered = arrival.entered_ns or (-1,) * len(arrival.firsts)
            for (key, sequence, duration_ns), since_ns in zip(arrival.firsts, entered, strict=True):
                by_group.setdefault(key, {})[rank] = sequence, duration_ns, since_ns
        found: dict[str, Float64s] = {}
        begun: dict[str, Float64s] = {}
        for key, calls in by_group.items():
            members, met = tuple(sorted(calls)), self._sizes.get(key)
            if met is None or len(members) != met.size:
                continue  # some have another first call in this step, or none
            sequences = {sequence for sequence, _, _ in calls.values()}
            durations = np.array([calls[rank][1] for rank in members], dtype=np.float64) / 1e9
            if len(sequences) != 1 or (durations < 0).any():
                continue
            group = self._groups.setdefault(key, _Group(met.name, members))
            if group.members != members:
                continue
            group.transfers.append(float(durations.min()))
            waits = durations - durations.min()
            group.waits.append(float(np.median(waits)))
            found[f"{key:016x}"] = waits[:, None]
            since = np.array([calls[rank][2] for rank in members], dtype=np.float64)
            if (since >= 0).any():
                begun[f"{key:016x}"] = np.where(since >= 0, since / 1e9 + waits, np.nan)[:, None]
        return found, begun

    def _sharing(self) -> list[list[str]]:
        """Sets of groups whose members are behind the same switches, more than one: they share the links between
        those. By their size, so that all agree on the order."""
        if self._topology is None:
            return []
        sets: dict[tuple[str, ...], list[str]] = {}
        for key, group in sorted(self._groups.items()):
            hosts = {self._view.host_of.get(rank, "") for rank in group.members}
            leaves = {self._topology.hosts.get(host, {}).get("leaf", ("",))[0] for host in hosts}
            if len(leaves) > 1 and "" not in leaves:
                sets.setdefault(tuple(sorted(leaves)), []).append(f"{key:016x}")
        return [names for names in sets.values() if len(names) > 1]

    def _delays(self, order: Order) -> dict[int, dict[int, int]]:
        """What each rank is to be held for, by rank and group, in nanoseconds."""
        found: dict[int, dict[int, int]] = {}
        for key, group in self._groups.items():
            name = f"{key:016x}"
            cap_s = min(self.limits.cap_s(name), self.limits.cap_s(group.name))
            turn_s = min(self._turn_s(order, name), order.patience_s)
            for member, rank in enumerate(group.members):
                # A rehearsal tells what it would be: the bounds are the same.
                # Of who comes so early that a moment cuts nothing: it does when the rank comes.
                held_s = replace(order, dry_run=False).delay_of(
                    name, member, 0, age_s=0.0, cap_s=cap_s, since_s=-HARD_CAP_S
                )
                delay_s = min(held_s + turn_s, cap_s)
                if delay_s >= LEAST_S:
                    found.setdefault(rank, {})[key] = min(round(delay_s * 1e9), MOST_DELAY_NS)
        length_s = median(self._lengths) if self._lengths else 0.0
        num_steps = median(self._strides) if self._strides else 1
        most_ns = min(round(self.limits.iteration_share * length_s / num_steps * 1e9), MOST_DELAY_NS)
        for delays in found.values():
            # A rank in several groups pays for all of them.
            total = sum(delays.values())
            if total > most_ns:
                for key in delays:
                    delays[key] = delays[key] * most_ns // total
        return found

    def _until(self, order: Order) -> dict[int, int]:
        """Nanoseconds after its own step began until which a rank is held at most, by group; of a group that takes its
        turn behind others so much later."""
        found = {}
        for key in self._groups:
            moments = order.not_before_s.get(f"{key:016x}", ())
            if moments and math.isfinite(moments[0]):
                turn_s = min(self._turn_s(order, f"{key:016x}"), order.patience_s)
                found[key] = min(max(round((moments[0] + turn_s) * 1e9), 1), MOST_MOMENT_NS)
        return found

    def _turn_s(self, order: Order, name: str) -> float:
        """For how long the groups before this one are busy on the link that they share. An order of turns without a
        word between ranks: who comes later in the chain goes later by what the transfers before it take."""
        total_s, before = 0.0, order.after.get(name)
        for _ in range(len(order.after)):
            if before is None:
                break
            group = self._groups.get(int(before, 16))
            total_s += median(group.transfers) if group is not None and group.transfers else 0.0
            before = order.after.get(before)
        return total_s

    def _send(self, order: Order, now_ns: int) -> None:
        if order.dry_run or self.mode is not Mode.ENABLE or not self._view.is_free:
            return
        delays = self._fitting(self._delays(order)) if self._pacer is not None and self._pacer.is_paced else {}
        self._wanted = set(delays)
        self._moments = self._until(order)
        if not delays and not self._sent:
            return
        self._order_ns = now_ns
        self._publish_hold(delays)

    def _fitting(self, delays: Mapping[int, Mapping[int, int]]) -> dict[int, dict[int, int]]:
        """Those of as many groups as an order has room for: the ones that wait longest. Ranks of others are free."""

        def waited(key: int) -> float:
            waits = self._groups[key].waits
            return -median(waits) if waits else 0.0

        chosen = set(sorted({key for own in delays.values() for key in own}, key=waited)[:MOST_GROUPS])
        fitting = {rank: {key: ns for key, ns in own.items() if key in chosen} for rank, own in delays.items()}
        return {rank: own for rank, own in fitting.items() if own}

    def _release(self) -> None:
        """Nobody is held from now on."""
        if self._sent:
            self._publish_hold({})

    def _publish_hold(self, delays: Mapping[int, Mapping[int, int]]) -> None:
        self._sent = {rank: dict(own) for rank, own in delays.items()}
        self._has_held = self._has_held or bool(self._sent)
        by_group: dict[int, list[tuple[int, int]]] = {}
        for rank, own in sorted(self._sent.items()):
            for key, delay_ns in own.items():
                by_group.setdefault(key, []).append((rank, delay_ns))
        self._number += 1
        told = tuple((key, tuple(ranks)) for key, ranks in by_group.items())
        moments = tuple((key, self._moments[key]) for key in by_group if key in self._moments)
        self._publish(bus.Hold(number=self._number, ttl_s=self.limits.ttl_s, delays=told, moments=moments))

    def _change(self, step: int, phase: str | Phase, why: str) -> None:
        change = PacingChange(at=self._now(), step=max(step, 0), mode=self.mode, phase=str(phase), why=why)
        self._changes.append(change)
        self._told(change)


def in_words(change: PacingChange) -> str:
    """For people who follow the job."""
    return f"pacing: {change.phase + ': ' if change.phase else ''}{change.why}"

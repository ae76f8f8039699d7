"""Pacing: when ranks are to enter a reduction later than they could, by how much, and when to stop asking for it.

The policy of a coordinator as a pure state machine: `Pacer.observe` takes what one iteration showed (who waited for how
long, how long it took) with the time, and returns the `Order` that holds from then on, or None where the last one
stands. It does not send, sleep or read a clock. What it may ask is bounded three times: by the `Limits` here, by the
order's own time to live, and by `Order.delay_of`, which whoever holds a rank back must use: it refuses what is too
long or too old, so that a lying rank, coordinator or message makes nobody wait longer than the cap, nor after the TTL.

Early ranks are held until a moment of their own iteration: when the last one has come lately, by a low quantile, so
that who is late is not held; and at most for what they usually wait. Where nobody can tell moments, they are held for a
low quantile of their waits instead. Groups that share a link may be told to go one after another. None of it is
believed to help: the policy runs trials, blocks of iterations with and without it, and stays on only while a sequential
test says that throughput or steadiness gains and neither loses. `docs/fabric-model.md` tells what that gave on the
model. Used by `simulation`; the gate in the probe and the coordinator's commands build on `Order`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from eroica.errors import UserError

Float64s = npt.NDArray[np.float64]

Delays = tuple[tuple[float, ...], ...]
"""Of each member, in order of rank, at each of its reductions of an iteration. Seconds."""
VERSION = 1
HARD_CAP_S = 0.2
"""No configuration can ask for a longer delay of one reduction: a thousandth of the shortest usual group timeout."""
LONGEST_TTL_S = 60.0
MOST_CAPS = 64
"""Groups with a cap of their own."""


class Phase(StrEnum):
    """What the policy is doing."""

    WATCHING = "watching"
    """Dispersion is low, or was never seen: no delays."""
    TRIAL = "trial"
    """Blocks of iterations with and without delays by turns."""
    ON = "on"
    """A trial has shown a gain; another one follows when it is due."""
    RESTING = "resting"
    """A trial has shown none, or a loss: off for a while, longer each time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a user may set. Checked when made."""

    threshold: float = 0.05
    """Dispersion (median waiting of a group, hidden or not) over the iteration, above which pacing is tried. Below a
    twentieth there is nothing worth a trial."""
    hysteresis: float = 0.5
    """Dispersion must fall below this share of the threshold to stop."""
    max_delay_s: float = 0.05
    """Of one reduction on one rank: a fifth of a usual iteration, far from any timeout."""
    iteration_share: float = 0.2
    """Nor more than this share of the iteration in all, over all reductions of a rank."""
    group_caps_s: Mapping[str, float] = field(default_factory=dict)
    """Lower caps for single groups, by name."""
    ttl_s: float = 10.0
    """An order that is not renewed ends by itself."""
    quantile: float = 0.1
    """Of the moments at which the last rank came lately: nobody is held beyond. Nine times of ten the last one comes
    later, and is not held. Where moments are not known: of a rank's recent waits, for which it is held then."""
    memory: int = 20
    """Iterations that count as recent."""
    orders_groups: bool = True
    """Groups that share a link may be told to go one after another."""
    block: int = 10
    """Iterations of one block of a trial; the first two of each are left out, since they carry over."""
    most_blocks: int = 40
    """A trial without an answer by then is over: whatever it is, it is too little."""
    rest: int = 500
    """Iterations off after a trial without gain; doubled each time, to eight times this."""
    again: int = 2000
    """Iterations on until the next trial."""
    dry_run: bool = False
    """Say what would be done, and do nothing."""

    def __post_init__(self) -> None:
        bounds = {
            "threshold": (self.threshold, 0.0, 1.0),
            "hysteresis": (self.hysteresis, 0.0, 1.0),
            "max_delay_s": (self.max_delay_s, 0.0, HARD_CAP_S),
            "iteration_share": (self.iteration_share, 0.0, 0.5),
            "ttl_s": (self.ttl_s, 0.1, LONGEST_TTL_S),
            "quantile": (self.quantile, 0.0, 0.5),
            "memory": (self.memory, 4, 1000),
            "block": (self.block, 4, 1000),
            "most_blocks": (self.most_blocks, 4, 1000),
            "rest": (self.rest, 1, 1_000_000),
            "again": (self.again, 1, 10_000_000),
        }
        bounds |= {f"the cap of group {name!r}": (cap, 0.0, HARD_CAP_S) for name, cap in self.group_caps_s.items()}
        for name, (value, low, high) in bounds.items():
            if not (math.isfinite(value) and low <= value <= high):
                raise UserError(f"pacing: {name} is {value:g}; choose {low:g} to {high:g}")

    def cap_s(self, group: str) -> float:
        """Longest delay of one reduction of a group."""
        return min(self.max_delay_s, self.group_caps_s.get(group, math.inf))


def readable_gain(gain: float, error: float) -> str:
    """A gain of throughput with its interval of 95 %, from its standard error."""
    return f"throughput {gain:+.1%} +- {1.96 * error:.1%}"


def limits_of(
    threshold: float | None,
    max_delay_s: float | None,
    ttl_s: float | None,
    group_caps_s: Mapping[str, float] = MappingProxyType({}),
) -> Limits:
    """What a user has set, the rest as it is by default. Raises UserError."""
    usual = Limits()
    if len(group_caps_s) > MOST_CAPS:
        raise UserError(f"pacing: {len(group_caps_s)} groups have caps of their own; {MOST_CAPS} may")
    return replace(
        usual,
        threshold=usual.threshold if threshold is None else threshold,
        max_delay_s=usual.max_delay_s if max_delay_s is None else max_delay_s,
        ttl_s=usual.ttl_s if ttl_s is None else ttl_s,
        group_caps_s=dict(group_caps_s),
    )


@dataclass(frozen=True, slots=True)
class Order:
    """What a coordinator sends. All ranks of the job read the same one; it replaces the one before."""

    number: int
    """Rises; a lower one than the last is stale."""
    issued_s: float
    """By the coordinator's clock; a receiver counts the TTL from its own receipt."""
    ttl_s: float
    delay_s: Mapping[str, Delays]
    """By group."""
    after: Mapping[str, str]
    """Group -> group of the same device host that is to be done first; a chain, never a circle."""
    patience_s: float
    """A group goes anyway when it has waited for the other so long."""
    dry_run: bool = False
    version: int = VERSION
    not_before_s: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """By group, for each of its reductions: until when members are to be held, by the time since their own iteration
    began. `delay_s` bounds that for each of them. Empty: they are held for `delay_s`, whenever they come."""

    def delay_of(
        self, group: str, member: int, reduction: int, *, age_s: float, cap_s: float, since_s: float | None = None
    ) -> float:
        """What a rank may really be held for: 0 for an order that is too old, of another version or only a rehearsal,
        for a member that it does not know, and for numbers that are none; never more than the receiver's own cap.

        `since_s`: how long the rank's own iteration is under way. Of an order with moments, nobody is held who cannot
        tell it."""
        delays = self.delay_s.get(group, ())
        # The TTL is the sender's word: a receiver believes no more than it would have sent.
        is_valid = self.version == VERSION and not self.dry_run and 0 <= age_s <= min(self.ttl_s, LONGEST_TTL_S)
        if not is_valid or not 0 <= member < len(delays) or not 0 <= reduction < len(delays[member]):
            return 0.0
        delay = delays[member][reduction]
        if self.not_before_s:
            moments = self.not_before_s.get(group, ())
            if since_s is None or not math.isfinite(since_s) or not reduction < len(moments):
                return 0.0
            left = moments[reduction] - since_s
            delay = min(delay, left) if math.isfinite(left) else 0.0
        return min(delay, cap_s, HARD_CAP_S) if math.isfinite(delay) and delay > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Seen:
    """What one iteration showed."""

    step: int
    length_s: float
    wait_s: Mapping[str, Float64s]
    """Group -> (members, reductions) from entering to the last member's entering; NaN = not known. Empty where nothing
    was recorded of the iteration but its length."""
    begun_s: Mapping[str, Float64s] = field(default_factory=dict)
    """Group -> (members, reductions) from the beginning of the member's own iteration to the last member's entering, as
    this one saw it: own entering and `wait_s`. NaN = not known; no entry: nobody can tell, and holds are fixed."""


@dataclass(frozen=True, slots=True)
class Change:
    """For the audit log: what the policy has decided, and why."""

    step: int
    phase: Phase
    why: str


def dispersion(seen: Seen) -> float:
    """Median waiting over members of the group that waits most, relative to the iteration; 0 where nothing is known."""
    most = 0.0
    for waits in seen.wait_s.values():
        rows = np.flatnonzero(np.isfinite(waits.reshape(len(waits), -1)).all(axis=1))
        if len(rows):
            known = waits[rows]
            most = max(most, float(np.median(np.maximum(known, 0.0).sum(axis=1))))
    return most / seen.length_s if seen.length_s > 0 else 0.0


LEAST_S = 1e-4
"""Shorter delays are not worth a timer."""


USUAL = 0.5
"""Quantile of a rank's recent waits that bounds a hold until a moment: a rank that seldom waits is seldom early, and a
moment that is wrong costs no more than it usually loses."""


def moments(begun: Sequence[Float64s], quantile: float) -> tuple[float, ...]:
    """When the last member came to each reduction lately, by a low quantile over iterations; NaN where nobody knows.

    Of what members say of one iteration the median counts, so that one who lies or whose clock jumps moves nothing."""
    if not begun or len({b.shape for b in begun}) != 1 or begun[0].ndim != 2 or not begun[0].size:
        return ()
    table = np.array(begun)
    table = np.where(np.isfinite(table) & (table >= 0), table, np.nan)
    # Of a reduction that any iteration lacks nothing is said.
    is_known = np.isfinite(table).any(axis=1).all(axis=0)
    said = np.full(table.shape[2], np.nan)
    if is_known.any():
        said[is_known] = np.quantile(np.nanmedian(table[:, :, is_known], axis=1), quantile, axis=0)
    return tuple(said.tolist())


def bounded(
    waits: Sequence[Float64s], limits: Limits, group: str, length_s: float, quantile: float | None = None
) -> Delays:
    """Delay of each member at each of its reductions: a quantile of what it waited there lately, bounded. The limits'
    low one unless another is given.

    A member whose waits are not all known is not held. Who claims to have waited for ever is held for the cap at most,
    and that is all that the others can come to wait for it."""
    if not waits or len({w.shape for w in waits}) != 1 or waits[0].ndim != 2:
        return ()
    table = np.array(waits)
    cap = limits.cap_s(group)
    known = np.asarray(np.isfinite(table).all(axis=(0, 2)))
    quantile = limits.quantile if quantile is None else quantile
    low = np.quantile(np.where(np.isfinite(table), np.maximum(table, 0.0), 0.0), quantile, axis=0)
    held = np.where(known[:, None], np.minimum(low, cap), 0.0)
    most = limits.iteration_share * length_s
    total = held.sum(axis=1, keepdims=True)
    held = held * np.minimum(1.0, most / np.maximum(total, 1e-12))
    held = np.where(held >= LEAST_S, held, 0.0)
    return tuple(tuple(row) for row in held.tolist())


def holds(
    recent: Sequence[Seen], limits: Limits, length_s: float
) -> tuple[dict[str, Delays], dict[str, tuple[float, ...]]]:
    """For each group: delays, and until when, if all of the recent iterations tell that of all groups."""
    delays: dict[str, Delays] = {}
    until: dict[str, tuple[float, ...]] = {}
    groups = list(recent[-1].wait_s) if recent else []
    has_moments = all(group in seen.begun_s for seen in recent for group in groups)
    for group in groups:
        waits = [seen.wait_s[group] for seen in recent if group in seen.wait_s]
        delays[group] = bounded(waits, limits, group, length_s, USUAL if has_moments else None)
        if has_moments:
            until[group] = moments([seen.begun_s[group] for seen in recent], limits.quantile)
    return delays, until


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a trial says so far. Positive is a gain."""

    gain: float
    """Of throughput, relative."""
    gain_error: float
    steadier: float
    """Fall of the coefficient of variation, relative to that without."""
    pairs: int
    decided: bool
    is_better: bool


LOSS = 0.005
"""Of throughput, that a trial must rule out."""
GAIN = 0.005
"""Of throughput, that it must show, or..."""
STEADIER = 0.1
"""... this fall of the CV, with no loss of throughput."""
BOUNDS = (4.0, 2.8)
"""Standard errors at the first and the last look. Between them the bound falls with the square root of the looks, as a
sequential test must that looks after every pair; by simulation without any effect it says "better" in under 5 % of
trials (a test repeats that)."""
FEWEST_PAIRS = 6


def judge(off: Sequence[Float64s], on: Sequence[Float64s], most: int) -> Verdict:
    """Compare blocks of iteration times without and with pacing, pair by pair in the order in which they ran."""
    pairs = min(len(off), len(on))
    if pairs < 2:
        return Verdict(0.0, math.inf, 0.0, pairs, False, False)
    a, b = np.array([x.mean() for x in off[:pairs]]), np.array([x.mean() for x in on[:pairs]])
    ratio = np.log(a / b)
    gain, error = float(ratio.mean()), float(ratio.std(ddof=1) / math.sqrt(pairs))
    without, with_it = np.concatenate(off[:pairs]), np.concatenate(on[:pairs])
    cv_off, cv_on = float(without.std() / without.mean()), float(with_it.std() / with_it.mean())
    steadier = 1 - cv_on / cv_off if cv_off > 1e-6 else 0.0
    look = (pairs - FEWEST_PAIRS) / max(most // 2 - FEWEST_PAIRS, 1)
    bound = BOUNDS[0] + (BOUNDS[1] - BOUNDS[0]) * math.sqrt(min(max(look, 0.0), 1.0))
    # Of the CV's: its logarithm scatters by about 1 / sqrt(2 n) of each side, more with heavy tails.
    cv_error = 2.0 / math.sqrt(len(without))
    gains = gain - bound * error > 0 and gain >= GAIN
    calms = steadier >= STEADIER and steadier - bound * cv_error > 0 and gain - bound * error > -LOSS
    loses = gain + bound * error < 0
    better = (gains or calms) and not loses
    decided = pairs >= FEWEST_PAIRS and (better or loses or 2 * pairs >= most)
    return Verdict(gain, error, steadier, pairs, decided, better and pairs >= FEWEST_PAIRS)


class Pacer:
    """See the module. One for each job; owns what was seen, the phase and the number of the last order."""

    def __init__(self, limits: Limits, *, sharing: Sequence[Sequence[str]] = ()) -> None:
        """`sharing`: sets of groups whose transfers share a link, each in the order in which they may go."""
        self.limits = limits
        self.phase = Phase.WATCHING
        self.changes: list[Change] = []
        self.verdicts: list[Verdict] = []
        self._sharing = [tuple(names) for names in sharing if len(names) > 1]
        self._recent: deque[Seen] = deque(maxlen=limits.memory)
        self._spread: deque[float] = deque(maxlen=limits.memory)
        self._lengths: deque[float] = deque(maxlen=limits.memory)
        self._number = 0
        self._is_paced = False
        self._until = 0
        self._rest = limits.rest
        self._blocks: tuple[list[Float64s], list[Float64s]] = ([], [])
        self._block: list[float] = []
        self._sent_s = -math.inf

    @property
    def is_paced(self) -> bool:
        """Delays hold now (in a dry run: would hold)."""
        return self._is_paced

    def observe(self, seen: Seen, now_s: float) -> Order | None:
        """Take in one iteration. Returns what is to be sent; None: nothing, the last order stands until its TTL."""
        if not (math.isfinite(seen.length_s) and seen.length_s > 0):
            return None
        was = self._is_paced
        if not was and seen.wait_s:
            # Waits under pacing are what pacing left of them.
            self._recent.append(seen)
            self._spread.append(dispersion(seen))
        self._lengths.append(seen.length_s)
        self._step(seen)
        if not self._is_paced:
            return self._order(now_s) if was else None
        is_due = now_s - self._sent_s >= self.limits.ttl_s / 2
        return self._order(now_s) if not was or is_due else None

    def off(self, step: int, why: str, now_s: float) -> Order:
        """Somebody says so: off at once, and for the longest rest."""
        self._go(step, Phase.RESTING, why)
        self._until = step + 8 * self.limits.rest
        return self._order(now_s)

    def _step(self, seen: Seen) -> None:
        step = seen.step
        if self.phase is Phase.RESTING:
            if step >= self._until:
                self._go(step, Phase.WATCHING, "rested")
        elif self.phase is Phase.WATCHING:
            if len(self._spread) == self.limits.memory and float(np.median(self._spread)) >= self.limits.threshold:
                self._begin_trial(step, f"dispersion {np.median(self._spread):.1%} of the iteration")
        elif self.phase is Phase.ON:
            if step >= self._until:
                self._begin_trial(step, "it was on for long without proof")
        else:
            self._trial(seen)

    def _begin_trial(self, step: int, why: str) -> None:
        self._go(step, Phase.TRIAL, why)
        self._blocks = ([], [])
        self._block = []

    def _trial(self, seen: Seen) -> None:
        self._block.append(seen.length_s)
        if len(self._block) < self.limits.block:
            return
        self._blocks[self._is_paced].append(np.array(self._block[2:]))
        self._block = []
        # off on on off: a drift over the trial counts for both sides alike.
        done = len(self._blocks[0]) + len(self._blocks[1])
        self._is_paced = done % 4 in (1, 2)
        if done % 2:
            return
        verdict = judge(self._blocks[0], self._blocks[1], self.limits.most_blocks)
        if not self._is_paced and self._is_calm():
            self._go(seen.step, Phase.WATCHING, "dispersion fell")
        elif verdict.decided:
            told = f"{readable_gain(verdict.gain, verdict.gain_error)}, CV {-verdict.steadier:+.0%}"
            why = told if verdict.is_better else f"no gain: {told}"
            if self.limits.dry_run:
                # Both sides were alike, and their difference is chance.
                verdict, why = replace(verdict, is_better=False), "nobody was held in this rehearsal of a trial"
            else:
                self.verdicts.append(verdict)
            if verdict.is_better:
                self._go(seen.step, Phase.ON, why)
                self._until = seen.step + self.limits.again
                self._rest = self.limits.rest
            else:
                self._go(seen.step, Phase.RESTING, why)
                self._until = seen.step + self._rest
                self._rest = min(2 * self._rest, 8 * self.limits.rest)

    def _is_calm(self) -> bool:
        return float(np.median(self._spread)) < self.limits.hysteresis * self.limits.threshold

    def _go(self, step: int, phase: Phase, why: str) -> None:
        self.phase = phase
        self._is_paced = phase is Phase.ON
        self.changes.append(Change(step, phase, why))

    def _order(self, now_s: float) -> Order:
        self._number += 1
        self._sent_s = now_s
        delays: dict[str, Delays] = {}
        until: dict[str, tuple[float, ...]] = {}
        after: dict[str, str] = {}
        length_s = float(np.median(self._lengths)) if self._lengths else 0.0
        if self._is_paced:
            delays, until = holds(self._recent, self.limits, length_s)
            if self.limits.orders_groups:
                for names in self._sharing:
                    after |= dict(zip(names[1:], names, strict=False))
        return Order(
            number=self._number,
            issued_s=now_s,
            ttl_s=self.limits.ttl_s,
            delay_s=delays,
            after=after,
            patience_s=min(self.limits.max_delay_s, self.limits.iteration_share * length_s),
            dry_run=self.limits.dry_run,
            not_before_s=until,
        )

"""Iterations of one rank, learnt from the marks that its hooks leave: one per completed update cycle.

Pure: marks and times in, records out; standard library only, so that the probe may import it. It is not the judge of
what is slow (`degradation`), and not the coordinate that ranks share: that is `Iterations.counts`, raw counts which
need no interpretation. Used by the agent, which reads marks from a rank's flight ring.

A worked example: gradient accumulation over two batches, with a loader that fetches one batch ahead (accelerate).

    marks       n n n [ ] n n [ ] n n [ ]       n a batch was delivered, [ ] the optimizer's step began and ended
    learning    the optimizer steps: it may not be the only one, so the first cycle stays open
    2nd [       it steps again, so it closes the cycle. Iteration 0 ended at its first ], with 3 batches
    2nd ]       iteration 1, 2 batches. Groups so far: 3, 2; from the third on "2 batches" is the usual size
    then        n n n n [ ] has twice the usual batches: two iterations, and the first one's step was skipped (a grad
                scaler fires no hook) if these batches came from the loader that feeds training, and as many
                collectives as in training came with them; else the batches were an evaluation's

Which optimizer closes a cycle is learnt from how often each one steps: the rarest that still steps regularly. Five
critic steps and one generator step are one iteration; so are the hundred steps of an optimizer per parameter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from itertools import pairwise

from eroica.periods import Period


class Mark(IntEnum):
    """One letter of the event string, as the hooks of a rank see it."""

    NEXT = 1
    """n: a loader delivered a batch. Source: the data set, by a number that outlives rebuilt iterators; 0 unknown."""
    EXHAUSTED = 2
    """A loader's next that ended its epoch (StopIteration). Source: as for NEXT."""
    BEGIN = 3
    """[: a step began, nested or not. Source: the optimizer."""
    END = 4
    """]: a step ended. Source: the optimizer."""
    COLLECTIVE = 5
    """c: a collective was entered. Source: what tells kinds apart: group, operation and size, hashed."""
    SKIPPED = 6
    """A step that a gradient scaler left out, where the probe saw it. Source: the optimizer."""


class Pause(Enum):
    """A phase in which a rank does something other than train; why an iteration is long or no mark comes."""

    EVALUATION = "evaluation"
    """Batches without steps: told by the probe, or seen from another loader's batches."""
    CHECKPOINT = "checkpoint"
    """A save or a load."""
    COMPILE = "compile"
    """The compiler runs."""
    RENDEZVOUS = "rendezvous"
    """The job forms its groups anew."""
    CAPTURE = "capture"
    """Our own profile window, whose cost is no fault of the job."""


class Basis(Enum):
    """What closes an iteration."""

    LEARNING = "learning"
    STEPS = "steps"
    BATCHES = "batches"
    """No optimizer was seen to step (duck-typed, DeepSpeed style): each batch is one."""
    COLLECTIVES = "collectives"
    """Neither steps nor batches: the period of the collectives."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Raw counts since the last rendezvous: the coordinate on which ranks agree."""

    generation: int
    steps: int
    """Outermost optimizer steps that ended."""
    batches: int
    """Batches delivered."""
    collectives: int


@dataclass(frozen=True, slots=True)
class Iteration:
    """One completed update cycle."""

    number: int
    """0, 1, ... over the whole life of this object, rendezvous included."""
    unit: int
    """Which learnt unit this is; iterations of different units are not comparable."""
    start_ns: int
    end_ns: int
    generation: int
    """Of the rendezvous."""
    step: int
    """Raw count at its end, of what the basis counts: outermost steps, else batches, else collectives."""
    num_batches: int
    """Batches delivered in it; those of an evaluation are left out."""
    num_steps: int
    num_collectives: int
    loader: int
    """Basis BATCHES: where its batch came from; else 0."""
    skipped: bool
    """A grad scaler left the step out; the end is then the arrival of the next batch."""
    pause: Pause | None
    """What else happened in it."""
    resumed_ns: int | None = None
    """Where an evaluation on other data was in it: when the first batch of training was asked for after that."""

    @property
    def duration_ns(self) -> int:
        """From the end of the one before to its own end."""
        return self.end_ns - self.start_ns


BATCHES_WITHOUT_STEP = 32
"""So many batches without a step: there is no optimizer that we can see. An accumulation longer than this is read as
one iteration per batch until its first step comes, which corrects it."""
MAX_CUTS = 512
"""Batches remembered within one group. Beyond, they are counted only: an evaluation, or steps that are all skipped."""
MAX_OPTIMIZERS = 256
"""Optimizers told apart; further ones only count. An optimizer per parameter makes thousands; any of them will do."""
MAX_LOADERS = 16
"""Training data sets told apart."""
RAREST = 16
"""An optimizer that steps less than once in so many steps of the most frequent one is a side matter and closes no
cycle; common ratios (critic to generator, actor to critic) are 1 to 10."""
COUNTED = 64
"""Counts of steps are halved when one reaches this, so that what was learnt can be unlearnt."""
FEEDING = 3
"""Updates in a row that had batches of a data set: it feeds training (labelled and unlabelled data, say), even if
another one's batch always comes last before the step. Nobody evaluates after each update."""
ALIKE = 0.75
"""Batches with at least this share of the usual collectives were trained on: evaluation under FSDP has about half."""


@dataclass(slots=True)
class _Group:
    """What came since the last boundary."""

    start_ns: int
    cuts: list[tuple[int, int, int]] = field(default_factory=list)
    """Of each batch: time, loader, collectives of this group before it."""
    num_batches: int = 0
    num_foreign: int = 0
    foreign: dict[int, int] = field(default_factory=dict)
    """Batches of each loader that was not known to feed training."""
    num_steps: int = 0
    num_skipped: int = 0
    num_collectives: int = 0
    pause: Pause | None = None
    resumed_ns: int | None = None
    is_partial: bool = False
    """Marks of it were lost: it is no iteration."""

    def absorb(self, later: _Group) -> None:
        """`later` follows and belongs to the same cycle."""
        self.cuts += [(time, loader, self.num_collectives + before) for time, loader, before in later.cuts]
        self.num_batches += later.num_batches
        self.num_foreign += later.num_foreign
        self.num_steps += later.num_steps
        self.num_skipped += later.num_skipped
        self.num_collectives += later.num_collectives
        self.pause = self.pause or later.pause
        self.resumed_ns = later.resumed_ns
        self.is_partial |= later.is_partial


@dataclass(slots=True)
class _Stepping:
    """How often one optimizer steps, and how often a batch came right after it."""

    steps: int = 0
    before_batch: int = 0


class Iterations:
    """Learns the unit of one rank's marks and yields its iterations. Never raises, whatever the order of marks.

    Memory is bounded; time per mark is O(1) amortised. Marks come in the order in which the rank wrote them; a time
    that runs backwards is raised to the latest one seen.
    """

    def __init__(self, generation: int = 0, *, skips_are_told: bool = False) -> None:
        """`skips_are_told`: steps that a scaler leaves out come as marks, so that batches without a step are never
        taken for them, but for an evaluation on the data of training."""
        self._skips_are_told = skips_are_told
        self.basis = Basis.LEARNING
        self.unit = 0
        self.last_ns: int | None = None
        """Time of the last mark."""
        self.gaps_ns = (0, 0)
        """The two longest times without a mark that ended by themselves, outside of pauses and the first iterations."""
        self._number = 0
        self._first = 0
        self._generation = generation
        self._steps = self._batches = self._collectives = 0
        self._told: Pause | None = None
        self._forget()

    def _forget(self) -> None:
        """Back to learning, as at the start of a process."""
        self.basis = Basis.LEARNING
        self._group: _Group | None = None
        self._depth = self._lost = 0
        self._loader = 0
        self._training: dict[int, None] = {}
        self._foreign: dict[int, int] = {}
        self._sizes: deque[int] = deque(maxlen=32)
        self._usual_collectives: deque[int] = deque(maxlen=32)
        self._period = Period()
        self._forget_optimizers()

    def _forget_optimizers(self) -> None:
        self._anchor: int | None = None
        self._cycle: dict[int, None] = {}
        self._pending: _Group | None = None
        self._pending_end_ns = self._pending_step = 0
        self._stepping: dict[int, _Stepping] = {}
        self._stepped: int | None = None
        self._widest = 1

    @property
    def counts(self) -> Counts:
        """Raw counts since the last rendezvous."""
        return Counts(self._generation, self._steps, self._batches, self._collectives)

    @property
    def pause(self) -> Pause | None:
        """What the rank does now, if it does not train: told by the probe, else seen from the loader it reads."""
        if self._told is not None:
            return self._told
        group = self._group
        if self.basis is Basis.STEPS and group and self._batches_of(group) > self._usual_size() + 1:
            return Pause.EVALUATION
        if self.basis is Basis.STEPS and group and group.num_foreign:
            return Pause.EVALUATION
        return None

    def feed(self, mark: Mark, time_ns: int, source: int = 0, begin_ns: int | None = None) -> Sequence[Iteration]:
        """The iterations that this mark completes, mostly none. `begin_ns`: when a batch was asked for, if known."""
        time_ns = self._clock(time_ns)
        group = self._group
        if group is None:
            group = self._group = _Group(time_ns, pause=self._told)
        if mark is Mark.COLLECTIVE:
            self._collectives += 1
            group.num_collectives += 1
            return self._on_collective(time_ns, source) if self._batches == 0 and self._steps == 0 else ()
        if mark is Mark.NEXT:
            return self._on_batch(group, time_ns, source, time_ns if begin_ns is None else begin_ns)
        if mark is Mark.BEGIN:
            if self._depth == 0:
                self._lost = 0  # A step that a batch interrupted and that never ended had raised.
            self._depth = min(self._depth + 1, 64)
            return ()
        if mark is Mark.END:
            if self._depth:
                self._depth -= 1
            elif self._lost:
                self._lost -= 1
            else:
                return ()
            return self._on_step(time_ns, source) if self._depth == 0 and self._lost == 0 else ()
        if mark is Mark.SKIPPED:
            return self._on_step(time_ns, source, skipped=True) if self._depth == 0 else ()
        if mark is Mark.EXHAUSTED:
            # With a prefetching loader the last batch of an epoch is trained on after this; an evaluation may have come
            # in between, and its loader must not be taken for the one that feeds the step.
            self._loader = source
        return ()

    def begin(self, pause: Pause, time_ns: int) -> None:
        """The probe tells that a pause begins; a second one within it is part of it."""
        time_ns = self._clock(time_ns)
        self._told = self._told or pause
        if self._group is None:
            self._group = _Group(time_ns)
        self._group.pause = self._group.pause or pause

    def end(self, pause: Pause, time_ns: int) -> None:
        """That pause is over."""
        self._clock(time_ns, quiet=True)
        if self._told is pause:
            self._told = None

    def lose(self, time_ns: int) -> None:
        """Marks before `time_ns` are missing: what is in progress is no iteration; what was learnt stays."""
        self._group = _Group(self._clock(time_ns, quiet=True), pause=self._told, is_partial=True)
        self._depth = self._lost = 0
        self._pending = self._stepped = None
        self._cycle.clear()
        self._foreign.clear()

    def forget_collectives(self) -> None:
        """No more collectives are fed: they tell no longer what is training and what an evaluation."""
        self._usual_collectives.clear()

    def restart(self, generation: int, time_ns: int) -> None:
        """A new rendezvous: raw counts start at 0 and the unit is learnt anew; iterations are numbered on."""
        self._forget()
        self.unit += 1
        self._generation = generation
        self._steps = self._batches = self._collectives = 0
        self._told = None
        self._first = self._number
        self.gaps_ns = (0, 0)
        self.last_ns = time_ns

    def finish(self) -> Sequence[Iteration]:
        """The marks end here: what is complete but was waiting to be told apart from other things."""
        done: list[Iteration] = []
        if self._pending is not None:
            done += self._close(self._pending, self._pending_end_ns, self._pending_step)
            self._pending = None
        group = self._group
        self._group = None
        if group is None or self.last_ns is None:
            return done
        if self.basis is Basis.STEPS:
            done += self._skipped(group, self.last_ns)
        elif self._steps == 0 and group.cuts:
            done += self._by_batch(group, self.last_ns)
        return done

    def _clock(self, time_ns: int, quiet: bool = False) -> int:
        last = self.last_ns
        if last is None:
            self.last_ns = time_ns
            return time_ns
        gap = time_ns - last
        if gap <= 0:
            return last
        self.last_ns = time_ns
        if gap > self.gaps_ns[1] and not quiet and self._told is None and self._number - self._first >= 10:
            longest = self.gaps_ns[0]
            self.gaps_ns = (gap, longest) if gap > longest else (longest, gap)
        return time_ns

    def _on_batch(self, group: _Group, time_ns: int, loader: int, begin_ns: int) -> Sequence[Iteration]:
        self._batches += 1
        if self._depth:  # A closure that fetches batches, or a step that raised: the next mark tells.
            self._lost, self._depth = self._depth, 0
        if self._stepped is not None:
            self._stepping[self._stepped].before_batch += 1
            self._stepped = None
        self._loader = loader
        group.num_batches += 1
        if self._training and loader not in self._training:
            group.num_foreign += 1
            group.resumed_ns = None
            group.foreign[loader] = group.foreign.get(loader, 0) + 1
            if self.basis is Basis.STEPS:
                return ()
        elif group.num_foreign and group.resumed_ns is None:
            group.resumed_ns = begin_ns
        if len(group.cuts) < MAX_CUTS:
            group.cuts.append((time_ns, loader, group.num_collectives))
        if self.basis is Basis.STEPS:
            return self._skipped(group, None) if len(group.cuts) == MAX_CUTS else ()
        if self.basis is Basis.BATCHES:
            return self._by_batch(group, time_ns) if len(group.cuts) > 1 else ()
        if self._batches < BATCHES_WITHOUT_STEP:
            return ()
        self.basis = Basis.BATCHES
        self.unit += 1
        return self._by_batch(group, time_ns)

    def _by_batch(self, group: _Group, time_ns: int) -> list[Iteration]:
        """Basis BATCHES: one iteration from each batch to the next; the last batch stays open unless marks end."""
        ends = [*group.cuts[1:], (time_ns, 0, group.num_collectives)]
        first = self._batches - len(group.cuts) + 1
        done = [
            self._iteration(a[0], b[0], first + i, 1, 0, b[2] - a[2], loader=a[1], pause=group.pause)
            for i, (a, b) in enumerate(zip(group.cuts, ends, strict=True))
            if b[0] > a[0]
        ]
        last_ns, loader, _ = group.cuts[-1]
        self._group = _Group(last_ns, [(last_ns, loader, 0)], pause=self._told)
        return done

    def _on_collective(self, time_ns: int, symbol: int) -> Sequence[Iteration]:
        """Neither steps nor batches so far."""
        relearnt = self._period.relearnt
        boundary = self._period.feed(symbol, time_ns)
        if self._period.relearnt != relearnt:
            self.basis = Basis.COLLECTIVES
            self.unit += 1
            # It was found anywhere within a unit.
            self._group = _Group(time_ns, pause=self._told, is_partial=True)
        elif boundary and self._group is not None:
            group = self._group
            self._group = _Group(time_ns, pause=self._told)
            if group.is_partial:
                return ()
            return [
                self._iteration(
                    group.start_ns, time_ns, self._collectives, 0, 0, group.num_collectives, pause=group.pause
                )
            ]
        return ()

    def _on_step(self, time_ns: int, optimizer: int, skipped: bool = False) -> Sequence[Iteration]:
        """An outermost step ended."""
        self._steps += 1
        group = self._group
        assert group is not None
        group.num_steps += 1
        group.num_skipped += skipped
        if self._loader and self._loader not in self._training:
            self._feeds(self._loader, group)
        if self.basis is not Basis.STEPS:
            if self.basis is not Basis.LEARNING:
                self.unit += 1
                group.num_batches = len(group.cuts)
            self.basis = Basis.STEPS
        done: list[Iteration] = []
        if self._anchor is None:
            if optimizer in self._cycle and self._pending is not None:
                self._anchor = next(reversed(self._cycle))
                done += self._close(self._pending, self._pending_end_ns, self._pending_step)
                self._pending = None
            else:
                if len(self._cycle) < MAX_OPTIMIZERS:
                    self._cycle[optimizer] = None
                if self._pending is None:
                    self._pending = group
                else:
                    self._pending.absorb(group)
                self._pending_end_ns, self._pending_step = time_ns, self._steps
                self._group = _Group(time_ns, pause=self._told)
        before = self._anchor
        self._count(optimizer)
        if before is not None and self._anchor != before:
            group.is_partial = True  # It began where the cycle was thought to end.
        if optimizer == self._anchor:
            self._group = _Group(time_ns, pause=self._told)
            done += self._close(group, time_ns, self._steps)
        elif self._anchor is not None and group.num_steps > 4 * self._widest + 16:
            # The optimizer that closed cycles no longer steps.
            self._forget_optimizers()
            self._sizes.clear()
            self.unit += 1
        return done

    def _feeds(self, loader: int, group: _Group) -> None:
        """A loader turns out to feed training."""
        self._training[loader] = None
        if len(self._training) > MAX_LOADERS:
            del self._training[next(iter(self._training))]
        group.num_foreign -= group.foreign.pop(loader, 0)

    def _look_at_foreign(self, group: _Group) -> None:
        """Whether a loader that is taken for an evaluation's was there in each of the last updates."""
        self._foreign = {loader: self._foreign.get(loader, 0) + 1 for loader in group.foreign}
        for loader, num_updates in self._foreign.items():
            if num_updates >= FEEDING:
                self._feeds(loader, group)
                self._sizes.clear()
                self.unit += 1

    def _count(self, optimizer: int) -> None:
        """Counts a step, and at some counts looks again for the optimizer that closes a cycle."""
        own = self._stepping.get(optimizer)
        if own is None:
            if len(self._stepping) >= MAX_OPTIMIZERS:
                self._stepped = None
                return
            own = self._stepping[optimizer] = _Stepping()
        own.steps += 1
        self._stepped = optimizer
        if len(self._stepping) == 1 or own.steps & (own.steps - 1) or (own.steps < 8 and own.steps != 2):
            return
        top = max(s.steps for s in self._stepping.values())
        # At powers of two of the most frequent one; and when one steps for the second time while others do often, which
        # is when a rare one has shown that it is regular.
        if (own.steps == top >= 8 or (own.steps == 2 and top >= 4)) and self._anchor is not None:
            # Optimizers of one cycle differ by the step that is just being counted.
            regular = {o: s for o, s in self._stepping.items() if s.steps >= 2 and s.steps * RAREST >= top}
            fewest = min(s.steps for s in regular.values())
            closing = {o: s for o, s in regular.items() if s.steps <= 1.25 * fewest + 1}
            if self._anchor not in closing:
                self._anchor = max(closing, key=lambda o: closing[o].before_batch)
                self._sizes.clear()
                self._usual_collectives.clear()
                self.unit += 1
        if top >= COUNTED:
            for other in list(self._stepping):
                s = self._stepping[other]
                s.steps //= 2
                s.before_batch //= 2
                if s.steps == 0:
                    del self._stepping[other]

    def _usual_size(self) -> int:
        """Batches of a usual group; of equally common sizes the latest. 0 while unknown."""
        counts: dict[int, int] = {}
        for size in reversed(self._sizes):
            counts[size] = counts.get(size, 0) + 1
        return max(counts, key=lambda size: counts[size], default=0)

    def _batches_of(self, group: _Group) -> int:
        return group.num_batches - group.num_foreign

    def _close(self, group: _Group, end_ns: int, step: int) -> list[Iteration]:
        """The iterations of a group that a step ended: one, and before it those whose step was skipped."""
        if group.is_partial:
            return []
        if self._foreign or group.foreign:
            self._look_at_foreign(group)
        if self._training and any(loader not in self._training for _, loader, _ in group.cuts):
            group.cuts = [cut for cut in group.cuts if cut[1] in self._training]
            group.num_foreign = group.num_batches - len(group.cuts)
        size, usual = self._batches_of(group), self._usual_size()
        done: list[Iteration] = []
        if not self._skips_are_told and usual and size >= 2 * usual and self._trained_on(group, usual):
            done = self._split(group, usual, size // usual - 1, step - group.num_steps)
            size = self._batches_of(group)
        elif group.num_foreign or (usual and size > usual + 1):
            group.pause = group.pause or Pause.EVALUATION
        if group.pause is not Pause.EVALUATION:
            self._usual_collectives.append(group.num_collectives)
        if not group.num_foreign:
            self._sizes.append(size + sum(i.num_batches for i in done))
        self._widest = max(group.num_steps, self._widest - self._widest // 8)
        done.append(
            self._iteration(
                *(group.start_ns, end_ns, step, size, group.num_steps, group.num_collectives),
                skipped=group.num_skipped == group.num_steps > 0,
                pause=group.pause,
                resumed_ns=group.resumed_ns if group.num_foreign and size <= usual + 1 else None,
            )
        )
        return done

    def _trained_on(self, group: _Group, usual: int) -> bool:
        """Batches beyond the usual were trained on, and only the step is missing."""
        known = all(loader for _, loader, _ in group.cuts)
        typical = sorted(self._usual_collectives)[len(self._usual_collectives) // 2] if self._usual_collectives else 0
        if not typical:
            return known
        marks = [before for _, _, before in group.cuts[::usual]]
        if len(group.cuts) % usual == 0:
            marks.append(group.num_collectives)
        return all(b - a >= ALIKE * typical for a, b in pairwise(marks))

    def _skipped(self, group: _Group, ended_ns: int | None) -> list[Iteration]:
        """Whole units of batches for which no step came; with `ended_ns` no further batch will."""
        usual = self._usual_size()
        if group.is_partial:
            return []
        if not self._skips_are_told and usual and len(group.cuts) >= usual and self._trained_on(group, usual):
            if ended_ns is not None and ended_ns > group.cuts[-1][0]:
                group.cuts.append((ended_ns, group.cuts[-1][1], group.num_collectives))
            return self._split(group, usual, len(group.cuts), self._steps - group.num_steps)
        if len(group.cuts) == MAX_CUTS and 2 * usual <= MAX_CUTS:
            group.pause = group.pause or Pause.EVALUATION
        return []

    def _split(self, group: _Group, usual: int, num: int, step: int) -> list[Iteration]:
        """Takes up to `num` units off the front of a group; each ends when the first batch of the next arrives."""
        done: list[Iteration] = []
        taken = 0
        num = min(num, (len(group.cuts) - 1) // usual)
        for i in range(1, num + 1):
            time_ns, _, before = group.cuts[i * usual]
            done.append(
                self._iteration(
                    group.start_ns, time_ns, step, usual, 0, before - taken, skipped=True, pause=group.pause
                )
            )
            group.start_ns, taken = time_ns, before
        group.cuts = [(time, loader, before - taken) for time, loader, before in group.cuts[num * usual :]]
        group.num_batches -= num * usual
        group.num_collectives -= taken
        return done

    def _iteration(
        self,
        start_ns: int,
        end_ns: int,
        step: int,
        num_batches: int,
        num_steps: int,
        num_collectives: int,
        *,
        loader: int = 0,
        skipped: bool = False,
        pause: Pause | None = None,
        resumed_ns: int | None = None,
    ) -> Iteration:
        self._number += 1
        return Iteration(
            number=self._number - 1,
            unit=self.unit,
            start_ns=start_ns,
            end_ns=end_ns,
            generation=self._generation,
            step=step,
            num_batches=num_batches,
            num_steps=num_steps,
            num_collectives=num_collectives,
            loader=loader,
            skipped=skipped,
            pause=pause,
            resumed_ns=resumed_ns,
        )

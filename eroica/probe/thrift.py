"""What the probe may cost: sums what its hooks take and says in which steps collectives are recorded.

Recording a call and the end of it costs some microseconds, which hurts jobs with thousands of collectives per step.
When the sum of some steps is above `SHARE` of their time, collectives are recorded in one step of N only; in the others
a call leaves its position in the ring (`Ring.position`), at a fifth of the cost, and no record. N is a power of two and
a step is recorded where its number is a multiple of N: a rank with a larger N records a part of what others record, so
the steps fit over ranks without a word between them. While a window lasts all steps are recorded, whatever that costs:
a trace of gloo's does not say of which group a collective is, and its record does. No clock here: moments are
arguments. Used by the recorder and by `capture`.

The sum holds what the lines of the hooks take. It cannot hold what torch takes to hand a call to Python and back, some
10 us per collective (`bench/probe.py` measures it), which recording less does not save.
"""

from __future__ import annotations

SHARE = 0.001
"""Of the time of a step: the most that the hooks may cost."""
LEAST_SHARE_OF_PLACES = 1 / 8
"""Where positions alone cost more than `SHARE`, records may cost this part of them: fewer would save nothing."""
RELAXED = 0.3
"""Below this part of what they may cost, records are made in twice as many steps. Under a half, so that N does not
swing."""
LOOK_EVERY = 32
"""Steps between two looks, the first of which comes after the first step and only begins the count: by then groups have
been met, and much was compiled and allocated."""
MOST = 1024
"""Largest N. A job of 100 ms steps then still records one in two minutes."""
MOST_WHOLE_NS = 120 * 10**9
"""Somebody else's window is over by then, whether or not we were told."""
STEP_HOOKS_NS = 4_000
"""What the hooks of one dataloader next and one optimizer step take, as `bench/probe.py` measured; they are not timed
one by one, since reading the clock would be a good part of it."""


class Thrift:
    """See the module. Steps are the raw count, of nexts where a job has no steps that we can see."""

    def __init__(self) -> None:
        self.placed_ns = 0
        """What all calls have cost, recorded or not. Raised by all hooks without a lock: a lost addition is no harm."""
        self.recorded_ns = 0
        """What records have cost on top of that."""
        self.steps_ns = 0
        """What the hooks on steps have cost."""
        self.one_step_in = 1
        self.mask = 0
        """`one_step_in` - 1: a step is recorded where `step & mask` is 0. 0 while a window lasts."""
        self._whole_since_ns = 0
        """When the window began that lasts; 0 = none."""
        self._since_step = -1
        self._since_ns = self._placed_then_ns = self._recorded_then_ns = 0

    @property
    def spent_ns(self) -> int:
        """The whole sum."""
        return self.placed_ns + self.recorded_ns + self.steps_ns

    def look(self, step: int, now_ns: int) -> bool:
        """Count what was spent until `step` and think again; True if `one_step_in` has changed."""
        if self._whole_since_ns:
            if now_ns - self._whole_since_ns < MOST_WHOLE_NS:
                return False
            self.end_window()
        num_steps = step - self._since_step
        if self._since_step < 0 or num_steps <= 0:
            self._begin(step, now_ns)
            return False
        self.steps_ns += STEP_HOOKS_NS * min(num_steps, LOOK_EVERY)
        if num_steps < 2 * self.one_step_in:  # one recorded step and its like may not decide alone
            return False
        passed_ns = max(now_ns - self._since_ns, 1)
        placed = (self.placed_ns - self._placed_then_ns + STEP_HOOKS_NS * num_steps) / passed_ns
        recorded = (self.recorded_ns - self._recorded_then_ns) / passed_ns
        may = max(SHARE - placed, placed * LEAST_SHARE_OF_PLACES)
        before = self.one_step_in
        if recorded > may:
            while recorded > may and self.one_step_in < MOST:
                self.one_step_in *= 2
                recorded /= 2
        elif recorded < RELAXED * may and self.one_step_in > 1:
            self.one_step_in //= 2
        self.mask = self.one_step_in - 1
        self._begin(step, now_ns)
        return self.one_step_in != before

    def begin_window(self, now_ns: int) -> None:
        """Record all steps from here on."""
        self._whole_since_ns = now_ns
        self.mask = 0

    def end_window(self) -> None:
        """As before; what the window has cost does not count."""
        if self._whole_since_ns:
            self._whole_since_ns = 0
            self.mask = self.one_step_in - 1
            self._since_step = -1

    def _begin(self, step: int, now_ns: int) -> None:
        self._since_step, self._since_ns = step, now_ns
        self._placed_then_ns, self._recorded_then_ns = self.placed_ns, self.recorded_ns

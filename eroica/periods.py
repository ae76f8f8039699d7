"""The repeating unit of a stream of symbols: iterations of a job that shows neither batches nor steps.

Pure, standard library only. Not a search for approximate repeats: symbols (group, operation and size of a collective)
repeat exactly in training loops, and a stream that does not is left without iterations rather than given wrong ones.
Used by `steps` as its last resort.

It is wrong where one iteration holds the same collective several times and nothing else: the unit is then that single
collective, and its durations alternate.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

FIRST_LOOK = 64
"""Symbols before the first search."""
MAX_SYMBOLS = 2048
"""Symbols remembered: a unit has at most a third of them. FSDP over 200 layers makes some 600."""
MIN_SPAN = 24
"""Symbols that must repeat, however short the unit is."""


def smallest_period(symbols: Sequence[int]) -> int:
    """Length of the shortest unit that the end of `symbols` repeats at least three times; 0 if there is none.

    By the Z-function of the reversed symbols, O(n): z[p] is how far the stream, shifted by p, equals itself.
    """
    r = symbols[::-1]
    n = len(r)
    z = [0] * n
    left = right = 0
    for i in range(1, n):
        k = min(right - i, z[i - left]) if i < right else 0
        while i + k < n and r[k] == r[i + k]:
            k += 1
        z[i] = k
        if i + k > right:
            left, right = i, i + k
        # An earlier i would have been returned, so the first that is long enough is the shortest.
        if k >= 2 * i and k + i >= MIN_SPAN:
            return i
    return 0


class Period:
    """Tells at which symbols a new unit begins, once it knows the unit."""

    def __init__(self) -> None:
        self.length = 0
        """Symbols in a unit; 0 while unknown."""
        self.relearnt = 0
        """How often a unit was found."""
        self._symbols: deque[int] = deque(maxlen=MAX_SYMBOLS)
        self._times_ns: deque[int] = deque(maxlen=MAX_SYMBOLS)
        self._look = FIRST_LOOK
        self._anchor: int | None = None
        self._since = 0

    def feed(self, symbol: int, time_ns: int) -> bool:
        """True if a unit begins with this symbol."""
        self._symbols.append(symbol)
        self._times_ns.append(time_ns)
        self._since += 1
        if not self.length:
            if self._since >= self._look:
                self._search()
            return False
        if self._anchor is None:
            begins = self._since == self.length
        else:
            begins = symbol == self._anchor
            if self._since > 4 * self.length + FIRST_LOOK:
                self.length, self._look = 0, FIRST_LOOK
        if begins:
            self._since = 0
        return begins

    def _search(self) -> None:
        """Looks for a unit; on success this symbol is where counting begins."""
        symbols = list(self._symbols)
        self.length = p = smallest_period(symbols)
        if not p:
            # A search costs as much as there are symbols, so the next one waits for a share of that. Not longer: an
            # unrelated symbol now and then leaves only short stretches in which three units lie side by side.
            self._look = self._since + max(FIRST_LOOK // 2, len(symbols) // 8)
            return
        self.relearnt += 1
        self._since = 0
        unit, times = symbols[-p:], list(self._times_ns)
        gaps = [times[-p + i] - times[-p + i - 1] for i in range(p)]
        # Of the symbols that occur once: the one after the longest silence, where the last unit most likely ended.
        once = _once(unit)
        self._anchor = unit[max(once, key=lambda i: gaps[i])] if once else None


def _once(unit: Sequence[int]) -> list[int]:
    counts: dict[int, int] = {}
    for symbol in unit:
        counts[symbol] = counts.get(symbol, 0) + 1
    return [i for i, symbol in enumerate(unit) if counts[symbol] == 1]

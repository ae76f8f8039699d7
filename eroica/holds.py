"""For how long a rank is to be held back before collectives, as its flight ring has it, and the bounds of it.

An agent writes it (`ring.post_holds`), the gate of the probe reads it. Nobody trusts it: it carries a checksum, since
writer and reader share no lock; its end is a moment of CLOCK_MONOTONIC, so that it ends with nobody left to end it; and
`Holds.of` gives no more than the reader's own cap. Standard library only, since the probe reads it.

    word 0 number, stored last | 1 until_ns | 2 crc32 << 32 | how many | then group, delay_ns, moment_ns of each
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field

MOST_DELAY_NS = 200_000_000
"""Of one step, over all groups: a thousandth of the shortest usual timeout of a group. The gate takes no more from
anybody. The same as `fabric.pacing.HARD_CAP_S`, which a test compares: the probe must not import numpy."""
MOST_TTL_NS = 60_000_000_000
TIMEOUT_SHARE = 100
"""Nor more than the group's own timeout over this."""
MOST_GROUPS = 16
_HEAD = struct.Struct("<QQQ")
_ENTRY = struct.Struct("<QQQ")


@dataclass(frozen=True, slots=True)
class Holds:
    """What one rank is asked for."""

    number: int
    """Tells two of them apart; never 0."""
    until_ns: int
    """CLOCK_MONOTONIC of the rank's host."""
    delay_ns: Mapping[int, int] = field(default_factory=dict)
    """By the group's key in the ring: before the first collective of each step."""
    moment_ns: Mapping[int, int] = field(default_factory=dict)
    """For how long after its own step began the rank may be held at most: who comes later is not held. A group that is
    not here is held for its delay whenever the rank comes."""

    def of(self, group: int, now_ns: int, cap_ns: int, since_ns: int | None = None) -> int:
        """What the rank may really be held for; 0 when the time is over, or further off than anybody may ask for.

        `since_ns`: how long its step is under way; who cannot tell is not held until a moment."""
        if not 0 < self.until_ns - now_ns <= MOST_TTL_NS:
            return 0
        delay_ns = min(self.delay_ns.get(group, 0), cap_ns, MOST_DELAY_NS, self.until_ns - now_ns)
        if group in self.moment_ns:
            delay_ns = min(delay_ns, self.moment_ns[group] - since_ns) if since_ns is not None else 0
        return max(delay_ns, 0)


def pack(holds: Holds) -> bytes:
    """Inverse of `parse`. Raises ValueError for what does not fit."""
    if not (0 < holds.number < 1 << 64 and len(holds.delay_ns) <= MOST_GROUPS):
        raise ValueError(f"holds number {holds.number} with {len(holds.delay_ns)} groups do not fit a ring")
    if any(not 0 <= delay <= MOST_DELAY_NS for delay in holds.delay_ns.values()):
        raise ValueError(f"a rank cannot be held for longer than {MOST_DELAY_NS} ns: {dict(holds.delay_ns)}")
    if any(not 0 < moment < 1 << 64 for moment in holds.moment_ns.values()):
        raise ValueError(f"a moment comes after the step has begun: {dict(holds.moment_ns)}")
    entries = b"".join(_ENTRY.pack(key, delay, holds.moment_ns.get(key, 0)) for key, delay in holds.delay_ns.items())
    return _HEAD.pack(holds.number, holds.until_ns, _check(holds.number, holds.until_ns, entries)) + entries


def parse(data: bytes) -> Holds | None:
    """None for what is half written, damaged, or of a newer eroica."""
    if len(data) < _HEAD.size:
        return None
    number, until_ns, check = _HEAD.unpack_from(data)
    count = check & 0xFFFFFFFF
    end = _HEAD.size + count * _ENTRY.size
    if not number or count > MOST_GROUPS or end > len(data):
        return None
    entries = data[_HEAD.size : end]
    if check != _check(number, until_ns, entries):
        return None
    found = list(_ENTRY.iter_unpack(entries))
    return Holds(
        number,
        until_ns,
        {key: delay for key, delay, _ in found},
        {key: moment for key, _, moment in found if moment},
    )


def _check(number: int, until_ns: int, entries: bytes) -> int:
    return zlib.crc32(struct.pack("<QQ", number, until_ns) + entries) << 32 | len(entries) // _ENTRY.size

"""The two ends of the bus over hosts: an agent's and a coordinator's, over any carrier of bytes.

To an agent or a coordinator an end looks like the bus of one process (`bus.Link`). What lies between may lose, double
and reorder frames, and both sides may be started anew: messages are numbered, kept until they were heard, and handed on
once and in order (`delivery`). Only the standing of a rank needs no number, since the next one replaces it. What is
malformed, or not for the sender to say, is counted and left out; nothing that comes raises here.

    eroica.JOB.up.SESSION     an agent to the coordinator
    eroica.JOB.down           the coordinator to all agents of the job
    eroica.JOB.to.SESSION     the coordinator to one agent: what it has heard of it, and what that one has missed

SESSION is another one each time that an agent or a coordinator starts, so that nobody mistakes a new one for the old.
An agent takes commands once the coordinator has answered it, from there on. An agent that finds a new coordinator tells
it all that the old one has not heard, and where its ranks are.

One thread: carriers with threads of their own hand frames over in `deliver`. Used by `serve` and `live`; carriers are
`nats` and, in tests, networks that lose on purpose.
"""

from __future__ import annotations

import re
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import msgspec

from eroica import bus
from eroica.bus import Message
from eroica.delivery import Inbox, Outbox, Receiver, Told
from eroica.errors import DataError
from eroica.wire import MOST_MESSAGE_BYTES, MOST_NAME, MOST_TEXT, VERSION, Frame, read_frame, read_message, write_frame
from eroica.wire import write_message as write

EASY_AGENTS = 2_000
"""A coordinator takes some ten thousand frames a second. Agents of larger jobs say less often where their ranks are,
and that they live, so that all together say no more than so many that do so each second."""
BEAT_NS = 1_000_000_000
"""An agent says something at least so often."""
STANDING_NS = 200_000_000
"""Between two reports of where ranks are: two rounds of an agent."""
ALL_STANDINGS_NS = 5_000_000_000
"""Between reports of all ranks, moved or not."""
SILENT_NS = 8_000_000_000
"""Nothing heard for so long: the other end is away. Eight beats; an agent that reads stacks is silent for a second."""
FORGOTTEN_NS = 600_000_000_000
"""An agent that is silent for so long has gone, as a rule. One that was cut off comes back under the same session: of
it is kept how far it was heard, since it may not know that, and would tell it once more."""
MOST_AGENTS = 20_000
"""Of one job."""
MOST_JOBS = 1_000
MOST_STANDINGS = 4_096
"""Ranks of one host."""
HAND_ON_NS = 250_000_000
"""For what has come, before the loop goes on: 100,000 summaries at once take half a minute."""
MOST_WAITING_BYTES = 1 << 30
"""Taken and not yet handed on: the summaries of 100,000 ranks are half of it. What comes beyond is taken when it is
sent again."""
MOST_COMMANDS = 256
"""Kept for agents that have missed them; a command is of use for seconds."""


class Carrier(Protocol):
    """Carries bytes by subject. It may lose, double and reorder them."""

    def subscribe(self, subject: str, take: Callable[[str, bytes], None]) -> None:
        """Have `take` called, within `deliver`, with subject and bytes of what comes; "*" is any one word."""

    def unsubscribe(self, subject: str, take: Callable[[str, bytes], None]) -> None:
        """Have it called no more."""

    def send(self, subject: str, data: bytes) -> None:
        """Never waits and never raises."""

    def deliver(self) -> None:
        """Hand on what has come."""

    @property
    def num_connects(self) -> int:
        """How often a connection came about. Each time, what was under way may be lost."""


@dataclass(slots=True)
class Refused:
    """What came and was left out. `say` gets a sentence for the first of each kind."""

    say: Callable[[str], None]
    num: int = 0
    _said: set[str] = field(default_factory=set)

    def count(self, why: str, who: str) -> None:
        """One more."""
        self.num += 1
        kind = re.sub(r"\d[\d,]*", "#", why)
        if kind not in self._said and len(self._said) < 20:
            self._said.add(kind)
            self.say(f"left out what {who} sent: {why}")


def job_key(job: str) -> str:
    """The name of a job as one word of a subject."""
    return re.sub(r"[^A-Za-z0-9_-]+", "_", job)[:100].strip("_") or "job"


def new_session() -> str:
    """Of an end that starts."""
    return secrets.token_hex(8)


class AgentLink:
    """An agent's end, of one job."""

    def __init__(
        self,
        carrier: Carrier,
        *,
        job: str,
        host: str,
        clock: Callable[[], int],
        say: Callable[[str], None],
        session: str = "",
    ) -> None:
        self.job = job_key(job)
        self.host = host[:MOST_NAME]
        self.session = session or new_session()
        self._carrier = carrier
        self._clock = clock
        self._say = say
        self.refused = Refused(say)
        self._takers: list[tuple[tuple[type, ...], Callable[[Message], None]]] = []
        self._outbox = Outbox()
        self._coordinator = Receiver(0, 0)
        self._coordinator_session = ""
        self._inbox = Inbox(0)
        self._heard_ns: int | None = None
        self._standings: dict[int, bus.Standing] = {}
        self._moved: set[int] = set()
        self._is_urgent = False
        """More has changed than how far ranks are."""
        self._standings_ns = self._all_ns = self._beat_ns = -ALL_STANDINGS_NS
        self._num_connects = 0
        self._has_said_dropped = False
        self._must_answer = True
        self._subjects = (f"eroica.{self.job}.down", f"eroica.{self.job}.to.{self.session}")
        for subject in self._subjects:
            carrier.subscribe(subject, self._take)

    def subscribe(self, kinds: tuple[type, ...], take: Callable[[Message], None]) -> None:
        """Have `take` called with each message of these kinds that the coordinator sends."""
        self._takers.append((kinds, take))

    def publish(self, message: Message) -> None:
        """Queue a message for the coordinator. Beyond the limits of an `Outbox` the oldest is given up, and said."""
        if isinstance(message, bus.Standing):
            if any(other.training != message.training or other.generation != message.generation
                   for other in self._standings.values()):  # fmt: skip
                self._standings.clear()
                self._moved.clear()
            before = self._standings.get(message.rank)
            self._is_urgent = self._is_urgent or before is None or _state(before) != _state(message)
            self._standings[message.rank] = message
            self._moved.add(message.rank)
            return
        for told in (message, *_instead(message)):
            try:
                self._outbox.put(write(told))
                break
            except DataError as error:
                self._say(f"{error}; it is left out")
        if self._outbox.num_dropped and not self._has_said_dropped:
            self._has_said_dropped = True
            self._say("the coordinator has not been heard for long: the oldest of what it is to be told is given up")

    def deliver(self) -> None:
        """Hand on what the coordinator sent, and send what is due."""
        self._carrier.deliver()
        now_ns = self._clock()
        if self._carrier.num_connects != self._num_connects:
            self._num_connects = self._carrier.num_connects
            self._coordinator.hurry()
            self._all_ns = now_ns - ALL_STANDINGS_NS
            self._must_answer = True
        for first, messages in self._coordinator.due(self._outbox, now_ns, MOST_MESSAGE_BYTES):
            self._send(first, messages, [], now_ns)
        loose = self._loose(now_ns)
        if loose or self._must_answer or now_ns - self._beat_ns >= BEAT_NS * self._ease():
            for chunk in _chunks(loose):
                self._send(self._outbox.last + 1, [], chunk, now_ns)

    def leave(self) -> None:
        """Hear and say nothing more."""
        for subject in self._subjects:
            self._carrier.unsubscribe(subject, self._take)

    @property
    def is_heard(self) -> bool:
        """The coordinator was heard a moment ago."""
        return self._heard_ns is not None and self._clock() - self._heard_ns < SILENT_NS

    @property
    def is_told(self) -> bool:
        """The coordinator has heard all that was published, and was sent where ranks are."""
        is_heard = self._coordinator.heard >= self._outbox.last
        return bool(self._coordinator_session) and is_heard and not self._moved

    @property
    def num_dropped(self) -> int:
        """Messages that were given up, since nobody heard them."""
        return self._outbox.num_dropped

    def _loose(self, now_ns: int) -> list[Told]:
        if now_ns - self._all_ns >= ALL_STANDINGS_NS * self._ease():
            self._all_ns = now_ns
            self._moved.update(self._standings)
        spacing_ns = STANDING_NS if self._is_urgent else max(STANDING_NS, BEAT_NS * self._num_agents() / EASY_AGENTS)
        if not self._moved or now_ns - self._standings_ns < spacing_ns:
            return []
        self._standings_ns = now_ns
        self._is_urgent = False
        moved, self._moved = sorted(self._moved)[:MOST_STANDINGS], set()
        return [write(self._standings[rank]) for rank in moved]

    def _num_agents(self) -> float:
        """Of the whole job, if all hosts have as many ranks as this one."""
        world_size = max((standing.world_size for standing in self._standings.values()), default=0)
        return world_size / max(len(self._standings), 1)

    def _ease(self) -> float:
        return max(self._num_agents() / EASY_AGENTS, 1.0)

    def _send(self, first: int, messages: Sequence[Told], loose: Sequence[Told], now_ns: int) -> None:
        self._beat_ns = now_ns
        self._must_answer = False
        frame = Frame(
            version=VERSION,
            host=self.host,
            session=self.session,
            base=self._outbox.base,
            heard_session=self._coordinator_session,
            heard=self._inbox.taken,
            first=first,
            messages=_raw(messages),
            loose=_raw(loose),
        )
        self._carrier.send(f"eroica.{self.job}.up.{self.session}", write_frame(frame))

    def _take(self, subject: str, data: bytes) -> None:
        try:
            frame = read_frame(data)
        except DataError as error:
            self.refused.count(str(error), "a coordinator")
            return
        now_ns = self._clock()
        if frame.session != self._coordinator_session:
            if frame.heard_session != self.session:
                return  # not yet answered by this coordinator: the answer says from where on its commands are for us
            self._coordinator_session = frame.session
            self._inbox = Inbox(frame.base)
            # What an earlier one has heard and dealt with is over; the rest is told anew.
            self._coordinator = Receiver(self._outbox.base, self._outbox.base)
            self._all_ns = now_ns - ALL_STANDINGS_NS
            self._must_answer = True
        self._heard_ns = now_ns
        if frame.heard_session == self.session:
            self._coordinator.hears(min(frame.heard, self._outbox.last), now_ns)
            self._outbox.heard(self._coordinator.heard)
        for kind, data_ in self._inbox.take(frame.base, frame.first, frame.messages):
            self._must_answer = True
            try:
                message = read_message(kind, data_, bus.TO_AGENTS)
            except DataError as error:
                self.refused.count(str(error), "the coordinator")
                continue
            _hand_on(message, self._takers)


@dataclass(slots=True)
class _Peer:
    """An agent as the coordinator's end sees it."""

    host: str
    session: str
    inbox: Inbox
    outgoing: Receiver
    joined: int
    """Commands up to this number are before its time."""
    heard_ns: int
    must_answer: bool = True
    is_silent: bool = False


class CoordinatorLink:
    """A coordinator's end, of one job. Frames come by `take`, from whoever reads `eroica.*.up.*`."""

    def __init__(
        self,
        carrier: Carrier,
        *,
        job: str,
        clock: Callable[[], int],
        say: Callable[[str], None],
        session: str = "",
    ) -> None:
        self.job = job_key(job)
        self.session = session or new_session()
        self._carrier = carrier
        self._clock = clock
        self.refused = Refused(say)
        self._takers: list[tuple[tuple[type, ...], Callable[[Message], None]]] = []
        self._came: deque[tuple[_Peer, str, msgspec.Raw]] = deque()
        self._came_bytes = 0
        self._to_answer: list[_Peer] = []
        self._outbox = Outbox(most=MOST_COMMANDS)
        self._sent = 0
        """The last number that was sent to all agents at once."""
        self._beat_ns = 0
        self._peers: dict[str, _Peer] = {}
        self._taken: dict[str, int] = {}
        """How far sessions were heard that are forgotten, the last ones."""
        self._joined: list[str] = []
        """Hosts of agents that have spoken for the first time, and nobody was told yet."""
        self._num_connects = 0

    def subscribe(self, kinds: tuple[type, ...], take: Callable[[Message], None]) -> None:
        """Have `take` called with each message of these kinds that an agent sends."""
        self._takers.append((kinds, take))

    def publish(self, message: Message) -> None:
        """Queue a message for all agents of the job; a sentence is cut to what they take."""
        if isinstance(message, bus.Said) and len(message.text) > MOST_TEXT:
            # It may say of each rank why it gave nothing, in words that an agent has chosen.
            message = replace(message, text=message.text[: MOST_TEXT - 4] + " ...")
        self._outbox.put(write(message))

    def take(self, data: bytes, session: str) -> None:
        """Take a frame of an agent; `session` is the last word of its subject. Never raises."""
        try:
            frame = read_frame(data)
            if frame.session != session or not frame.host:
                raise DataError("a frame names another sender than its subject")
        except DataError as error:
            self.refused.count(str(error), f"an agent of job {self.job}")
            return
        now_ns = self._clock()
        peer = self._peers.get(session)
        if peer is None:
            if len(self._peers) >= MOST_AGENTS:
                self.refused.count(f"it would be more than {MOST_AGENTS} agents", f"an agent of job {self.job}")
                return
            last = self._outbox.last
            inbox = Inbox(max(frame.base, self._taken.pop(session, 0)))
            peer = _Peer(frame.host, session, inbox, Receiver(last, last), last, now_ns)
            self._peers[session] = peer
            self._joined.append(peer.host)
        peer.heard_ns = now_ns
        peer.is_silent = False
        if frame.heard_session == self.session:
            peer.outgoing.hears(min(frame.heard, self._outbox.last), now_ns)
        else:
            peer.must_answer = True
        peer.must_answer = peer.must_answer or bool(frame.messages)
        if peer.must_answer:
            self._to_answer.append(peer)
        if self._came_bytes > MOST_WAITING_BYTES:
            return
        for kind, content in (*peer.inbox.take(frame.base, frame.first, frame.messages), *frame.loose):
            self._came.append((peer, kind, content))
            self._came_bytes += len(memoryview(content))

    def deliver(self) -> None:
        """Hand on what has come, and send what is due.

        Answers go first: dealing with all that many agents say at once takes long, and whoever is not answered says it
        again. Then what has come is handed on, for a while; `is_behind` tells that some is left for the next time.
        """
        for peer in self._to_answer:
            if peer.must_answer:
                self._send(f"to.{peer.session}", self._outbox.last + 1, [], peer)
        self._to_answer.clear()
        joined, self._joined = self._joined, []
        for host in joined:
            _hand_on(bus.Joined(host=host), self._takers)
        now_ns = began_ns = self._clock()
        while self._came and now_ns - began_ns < HAND_ON_NS:
            self._hand_on_next()
            now_ns = self._clock()
        if self._carrier.num_connects != self._num_connects:
            self._num_connects = self._carrier.num_connects
            for peer in self._peers.values():
                peer.outgoing.hurry()
        self._broadcast(now_ns)
        silent_ns = SILENT_NS * max(len(self._peers) / EASY_AGENTS, 1.0)
        fallen = [p for p in self._peers.values() if now_ns - p.heard_ns > silent_ns and not p.is_silent]
        for peer in fallen:
            peer.is_silent = True
        heard = {p.host for p in self._peers.values() if not p.is_silent} if fallen else set()
        for host in sorted({peer.host for peer in fallen} - heard):
            _hand_on(bus.Silent(host=host), self._takers)
        for peer in list(self._peers.values()):
            if now_ns - peer.heard_ns > FORGOTTEN_NS:
                del self._peers[peer.session]
                self._taken[peer.session] = peer.inbox.taken
                if len(self._taken) > MOST_AGENTS:
                    del self._taken[next(iter(self._taken))]
                continue
            for first, messages in peer.outgoing.due(self._outbox, now_ns, MOST_MESSAGE_BYTES):
                self._send(f"to.{peer.session}", first, messages, peer)

    @property
    def is_behind(self) -> bool:
        """More has come than was handed on."""
        return bool(self._came)

    def _hand_on_next(self) -> None:
        peer, kind, content = self._came.popleft()
        self._came_bytes -= len(memoryview(content))
        try:
            message = read_message(kind, content, bus.TO_COORDINATOR)
            if getattr(message, "host", peer.host) != peer.host:
                raise DataError("an agent speaks for another host than its own")
        except DataError as error:
            self.refused.count(str(error), f"the agent of {peer.host} of job {self.job}")
            return
        _hand_on(message, self._takers)

    def _broadcast(self, now_ns: int) -> None:
        """What is new, to all agents at once; nothing, now and then, so that they know that we are here."""
        if self._sent >= self._outbox.last:
            if now_ns - self._beat_ns >= BEAT_NS and self._peers:
                self._beat_ns = now_ns
                self._send("down", self._outbox.last + 1, [], None)
            return
        self._beat_ns = now_ns
        before, self._sent = self._sent, max(self._sent, self._outbox.base)
        while self._sent < self._outbox.last:
            messages = self._outbox.after(self._sent, MOST_MESSAGE_BYTES)
            self._send("down", self._sent + 1, messages, None)
            self._sent += len(messages)
        for peer in self._peers.values():
            # Whoever lags behind gets it after what it has missed.
            if peer.outgoing.sent >= before:
                peer.outgoing.sends(self._sent, now_ns)

    def _send(self, where: str, first: int, messages: Sequence[Told], peer: _Peer | None) -> None:
        if peer is not None:
            peer.must_answer = False
        frame = Frame(
            version=VERSION,
            host="",
            session=self.session,
            base=self._outbox.base if peer is None else max(self._outbox.base, peer.joined),
            heard_session=peer.session if peer is not None else "",
            heard=peer.inbox.taken if peer is not None else 0,
            first=first,
            messages=_raw(messages),
            loose=[],
        )
        self._carrier.send(f"eroica.{self.job}.{where}", write_frame(frame))

    @property
    def hosts(self) -> dict[str, bool]:
        """Hosts with an agent, and whether it is heard."""
        found: dict[str, bool] = {}
        for peer in self._peers.values():
            found[peer.host] = found.get(peer.host, False) or not peer.is_silent
        return found


class Reception:
    """Where the agents of all jobs report: hands their frames to the end of each job, which it makes when needed."""

    def __init__(
        self,
        carrier: Carrier,
        on_job: Callable[[CoordinatorLink], None],
        *,
        clock: Callable[[], int],
        say: Callable[[str], None],
    ) -> None:
        """`on_job` is told of each job at its first sign of life."""
        self.links: dict[str, CoordinatorLink] = {}
        self._carrier = carrier
        self._on_job = on_job
        self._clock = clock
        self._say = say
        self.refused = Refused(say)
        carrier.subscribe("eroica.*.up.*", self._take)

    def deliver(self) -> None:
        """Hand on what has come, of all jobs, and send what is due."""
        self._carrier.deliver()
        for link in list(self.links.values()):
            link.deliver()

    def forget(self, job: str) -> None:
        """A job is over; it is known anew if one of its agents speaks again."""
        self.links.pop(job, None)

    def _take(self, subject: str, data: bytes) -> None:
        words = subject.split(".")
        if len(words) != 4 or words[1] != job_key(words[1]):
            self.refused.count("its subject is none of an agent's", "somebody")
            return
        job, session = words[1], words[3]
        link = self.links.get(job)
        if link is None:
            try:
                read_frame(data)
            except DataError as error:
                self.refused.count(str(error), "somebody")
                return
            if len(self.links) >= MOST_JOBS:
                self.refused.count(f"it would be more than {MOST_JOBS} jobs", "somebody")
                return
            link = self.links[job] = CoordinatorLink(self._carrier, job=job, clock=self._clock, say=self._say)
            self._on_job(link)
        link.take(data, session)


def _state(standing: bus.Standing) -> tuple[object, ...]:
    """What is told at once when it changes. How far a rank is may wait: ranks of a job go on together, and of many
    agents one has just said it."""
    return (standing.world_size, standing.generation, standing.training, standing.unit, standing.per_iteration,
            standing.is_alive)  # fmt: skip


def _hand_on(message: Message, takers: Sequence[tuple[tuple[type, ...], Callable[[Message], None]]]) -> None:
    for kinds, take in takers:
        if isinstance(message, kinds):
            take(message)


def _raw(messages: Sequence[Told]) -> list[tuple[str, msgspec.Raw]]:
    return [(kind, msgspec.Raw(content)) for kind, content in messages]


def _chunks(loose: Sequence[Told]) -> list[list[Told]]:
    """Such as fit a frame each; one that is empty if there are none."""
    chunks: list[list[Told]] = [[]]
    size = 0
    for told in loose:
        size += len(told[1])
        if size > MOST_MESSAGE_BYTES:
            chunks.append([])
            size = len(told[1])
        chunks[-1].append(told)
    return chunks


def _instead(message: Message) -> tuple[Message, ...]:
    """What is told in place of a message that is too large, the next if that is, too."""
    if isinstance(message, bus.Summarized):
        return (replace(message, summary=None, history=None, problem="has a summary that is too large to be sent"),)
    if isinstance(message, bus.Looked):
        note = f"the stacks of {message.host} are too large to be sent"
        bare = tuple(replace(view, threads=(), no_stack=note) for view in message.views)
        return replace(message, views=bare, notes=(note,)), replace(message, views=(), notes=(note,))
    return ()

"""The bus between agents and a coordinator: one suite over the one of one process, a lossy network and NATS."""

from __future__ import annotations

import contextlib
import random
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eroica import bus, wire
from eroica.access import ALL_JOBS, Pass, find_pass, load_pass, permissions
from eroica.arrivals import Arrival
from eroica.background import History, Lap, Span
from eroica.broker import Listening
from eroica.bus import Answered, Commit, Noticed, Prepare, Standing, Summarized
from eroica.codec import write_summary
from eroica.commands import Frames, State, Unit
from eroica.degradation import Change, Trigger
from eroica.errors import DataError, UserError
from eroica.relay import AgentLink, CoordinatorLink
from eroica.standing import Frame, RankView, Thread
from tests.buses import Clock, Ends, Network, in_one_process, over, over_nats
from tests.handmade import Rank, summary

SAID = tuple(kind for kind in bus.TO_COORDINATOR if kind is not bus.Joined)
"""What agents tell themselves, or leave unsaid."""
WAYS = ("one process", "a network that loses", "nats")


@pytest.fixture(params=WAYS)
def ends(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ends]:
    if request.param == "one process":
        yield in_one_process()
    elif request.param == "nats":
        with over_nats(tmp_path) as made:
            yield made
    else:
        yield over(Network(random.Random(7), loses=0.2, doubles=0.1, reorders=0.1))[0]


def answered(number: int, rank: int = 0) -> Answered:
    return Answered(window=number, rank=rank, state=State.DONE, why="é")


def standing(rank: int, count: int, host: str = "a", training: str = "j.1") -> Standing:
    return Standing(
        host=host,
        rank=rank,
        world_size=4,
        generation=0,
        training=training,
        unit=Unit.STEPS,
        count=count,
        per_iteration=1,
        aligned=count,
        num_iterations=count,
        iteration_s=0.1,
        is_alive=True,
    )


def prepare(number: int) -> Prepare:
    return Prepare(window=number, unit=Unit.STEPS, start=100, num_steps=20, frames=Frames.SAMPLED)


def all_messages() -> list[bus.Message]:
    """One of each kind that travels."""
    told = summary(2, Rank())
    history = History(
        laps=(Lap(5, 10**18, 10**8, ""), Lap(6, 10**18 + 1, 10**8, "save")),
        spans=(Span("gc", 5, 10**18, 4),),
        environment={"torch": "2.13", "threads": {"omp": 1}},
        changes=(Trigger(Change.SLOW, 10**12, 0, 90, 90, 10**8, 12 * 10**7, 0.2),),
    )
    view = RankView(rank=3, host="a", threads=(Thread("main", (Frame("f", "/x.py", 3),), is_main=True),), silent_s=3.5)
    return [
        standing(1, 7),
        Noticed(rank=2, trigger=Trigger(Change.RECURRING, 10**12, 0, 117, 117, 10**8, 12 * 10**7, 0.2, every=10)),
        bus.Died(rank=1, pid=77),
        answered(3),
        Summarized(window=3, rank=2, summary=write_summary(told), history=history),
        Summarized(window=3, rank=1, summary=None, problem="has no room"),
        bus.CountersRead(
            window=3,
            host="a",
            counters=({"kind": "host", "name": "a", "rank": None, "values": {"cpu": 0.5}, "labels": {"x": "y"}},),
        ),
        bus.Looked(look=4, host="a", views=(view,), limit_s=10.0, notes=("rank 4 is not seen",)),
        bus.Ending(host="a"),
        bus.Leaving(host="a"),
        bus.Arrived(
            rank=3,
            groups=(bus.Met(group=(1 << 64) - 1, name="data", size=4),),
            arrivals=(Arrival(7, 10**8, 0, (((1 << 64) - 1, 41, -1),)), Arrival(8, 10**8, 10**6, ())),
        ),
        bus.TellArrivals(ttl_s=5.0),
        bus.Hold(number=2, ttl_s=5.0, delays=(((1 << 64) - 1, ((0, 10**6), (3, 10**7))),)),
        prepare(3),
        Commit(window=3, expected_s=2.5),
        bus.Abort(window=3),
        bus.Resume(host="a", window=3, unit=Unit.STEPS, start=7, num_steps=2, frames=Frames.SAMPLED, expected_s=2.0),
        bus.LookCloser(look=4),
        bus.Closed(window=3, diagnosis="abc"),
        bus.Released(host="a"),
        bus.Said(text="rank 2 is slow"),
    ]


def test_what_agents_tell_arrives_once_and_in_the_order_in_which_each_told_it(ends: Ends) -> None:
    came: list[bus.Message] = []
    ends.coordinator.subscribe((Answered,), came.append)
    for number in range(1, 101):
        ends.agents[0].publish(answered(number, 0))
        ends.agents[1].publish(answered(number, 1))
    ends.rounds(lambda: len(came) >= 200)
    for rank in (0, 1):
        assert [m.window for m in came if isinstance(m, Answered) and m.rank == rank] == list(range(1, 101))


def test_a_command_reaches_every_agent_once_and_in_order(ends: Ends) -> None:
    came: list[list[bus.Message]] = [[], []]
    for agent, own in zip(ends.agents, came, strict=True):
        agent.subscribe(bus.TO_AGENTS, own.append)
    sent: list[bus.Message] = [prepare(1), Commit(window=1, expected_s=1.0), bus.Closed(window=1)]
    for message in sent:
        ends.coordinator.publish(message)
    ends.rounds(lambda: all(len(own) >= 3 for own in came))
    assert came == [sent, sent]


def test_a_taker_may_answer_what_it_gets(ends: Ends) -> None:
    came: list[bus.Message] = []
    ends.coordinator.subscribe((Answered,), came.append)

    def answer(message: bus.Message) -> None:
        assert isinstance(message, Prepare)
        ends.agents[0].publish(answered(message.window))

    ends.agents[0].subscribe((Prepare,), answer)
    ends.coordinator.publish(prepare(5))
    ends.rounds(lambda: came == [answered(5)])


def test_a_taker_gets_the_kinds_that_it_asked_for_and_no_others(ends: Ends) -> None:
    came: list[bus.Message] = []
    done: list[bus.Message] = []
    ends.coordinator.subscribe((Noticed,), came.append)
    ends.coordinator.subscribe((bus.Died,), done.append)
    ends.agents[0].publish(answered(1))
    ends.agents[0].publish(bus.Died(rank=0, pid=1))
    ends.rounds(lambda: bool(done))
    assert came == []


def test_the_latest_standing_of_each_rank_arrives(ends: Ends) -> None:
    latest: dict[int, int] = {}

    def take(message: bus.Message) -> None:
        assert isinstance(message, Standing)
        latest[message.rank] = message.count

    ends.coordinator.subscribe((Standing,), take)
    for count in range(50):
        ends.agents[0].publish(standing(0, count))
        ends.agents[1].publish(standing(1, count + 7, host="b"))
    ends.rounds(lambda: latest == {0: 49, 1: 56})


def test_every_kind_of_message_means_the_same_after_its_travel() -> None:
    told = all_messages()
    kinds = {type(message) for message in told}
    assert kinds == {*bus.TO_COORDINATOR, *bus.TO_AGENTS} - {bus.Silent, bus.Joined}
    for message in told:
        kind, data = wire.write_message(message)
        assert wire.read_message(kind, data, (type(message),)) == message


def test_a_rank_alone_may_be_told_with_paths_that_are_no_text_and_numbers_without_end() -> None:
    looked = bus.Looked(look=1, host="a", views=(RankView(rank=0, exception="bad \udcff byte"),))
    kind, data = wire.write_message(looked)
    read = wire.read_message(kind, data, bus.TO_COORDINATOR)
    assert isinstance(read, bus.Looked) and read.views[0].exception == "bad ? byte"
    history = History(environment={"seed": 1 << 80})
    kind, data = wire.write_message(Summarized(window=1, rank=0, summary=None, history=history))
    read = wire.read_message(kind, data, bus.TO_COORDINATOR)
    assert isinstance(read, Summarized) and read.history is not None
    assert read.history.environment == {"seed": str(1 << 80)}


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    loses=st.sampled_from([0.0, 0.3, 0.6]),
    doubles=st.sampled_from([0.0, 0.3]),
    reorders=st.sampled_from([0.0, 0.5]),
    bursts=st.lists(st.integers(0, 12), min_size=1, max_size=6),
)
def test_a_network_may_lose_double_and_reorder_and_nothing_is_lost_or_told_twice(
    seed: int, loses: float, doubles: float, reorders: float, bursts: list[int]
) -> None:
    ends, agents, _, _ = over(Network(random.Random(seed), loses, doubles, reorders))
    up: list[bus.Message] = []
    down: list[bus.Message] = []
    ends.coordinator.subscribe((Answered,), up.append)
    ends.agents[1].subscribe((Prepare,), down.append)
    number = 0
    for burst in bursts:
        for _ in range(burst):
            number += 1
            ends.agents[0].publish(answered(number))
            ends.coordinator.publish(prepare(number))
        ends.rounds(lambda: True)
    ends.rounds(lambda: len(up) >= number and len(down) >= number and agents[0].is_told)
    assert up == [answered(n + 1) for n in range(number)]
    assert down == [prepare(n + 1) for n in range(number)]


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=400), st.integers(0, 16), st.integers(0, 400))
def test_bytes_that_are_no_frame_or_a_damaged_one_are_refused_or_read_and_never_raise_anything_else(
    noise: bytes, which: int, at: int
) -> None:
    kind, data = wire.write_message(all_messages()[which])
    for broken in (noise, data[:at], data[: min(at, len(data))] + noise + data[at + len(noise) :]):
        with contextlib.suppress(DataError):
            wire.read_message(kind, broken, (*bus.TO_COORDINATOR, *bus.TO_AGENTS))
        with contextlib.suppress(DataError):
            wire.read_frame(broken)


def coordinator_end(said: list[str]) -> tuple[CoordinatorLink, list[bus.Message]]:
    """On its own, with what it hands on."""
    link = CoordinatorLink(Network(random.Random(0)).carrier(), job="waves", clock=Clock(), say=said.append)
    came: list[bus.Message] = []
    link.subscribe(SAID, came.append)
    return link, came


def told(*messages: bus.Message, host: str = "a", first: int = 1, version: int = 1) -> bytes:
    """A frame of an agent."""
    listed = [(kind, msgspec.Raw(data)) for kind, data in map(wire.write_message, messages)]
    return wire.write_frame(
        wire.Frame(
            version=version,
            host=host,
            session="s-a",
            base=0,
            heard_session="",
            heard=0,
            first=first,
            messages=listed,
            loose=[],
        )
    )


def test_what_an_agent_may_not_say_is_left_out_counted_and_said_once() -> None:
    said: list[str] = []
    link, came = coordinator_end(said)
    foreign: list[bus.Message] = [bus.Ending(host="b"), prepare(1), answered(70_000), bus.Ending(host="a")]
    link.take(told(*foreign), "s-a")
    link.take(told(*foreign, first=5), "s-a")
    link.deliver()
    assert came == [bus.Ending(host="a")] * 2 and link.refused.num == 6
    assert len(said) == 3 and any("another host" in text for text in said)


def test_numbers_with_which_no_coordinator_can_reckon_do_not_travel() -> None:
    told = Summarized(window=1, rank=0, summary=None)
    wrong: list[bus.Message] = [
        replace(standing(0, 9), iteration_s=5e-324),  # the steps in a second would be infinitely many
        replace(told, history=History(laps=(Lap(1 << 63, 1, 1, ""),))),
        replace(told, history=History(laps=(Lap(1, 1, 1, "", 1 << 63),))),
        replace(told, history=History(spans=(Span("gc", 1 << 63, 1, 1),))),
    ]
    for claim in wrong:
        with pytest.raises(DataError, match=r"does not fit|beyond all bounds"):
            wire.read_message(*wire.write_message(claim), bus.TO_COORDINATOR)
    sound = replace(told, history=History(laps=(Lap(1, 1, 1, ""),), spans=(Span("gc", 1, 1, 1),)))
    assert wire.read_message(*wire.write_message(sound), bus.TO_COORDINATOR) == sound


def test_settings_within_settings_without_end_do_not_travel() -> None:
    nested: object = 1
    for _ in range(500):  # a diagnosis of it could not be written as JSON
        nested = [nested]
    told = Summarized(window=1, rank=0, summary=None, history=History(environment={"x": nested}))
    with pytest.raises(DataError, match="beyond all bounds"):
        wire.read_message(*wire.write_message(told), bus.TO_COORDINATOR)
    told = replace(told, history=History(environment={"x": {"y": [1, {"z": 2}]}}))
    assert wire.read_message(*wire.write_message(told), bus.TO_COORDINATOR) == told


def test_a_frame_that_was_replayed_changes_nothing() -> None:
    link, came = coordinator_end([])
    for _ in range(5):
        link.take(told(answered(1), answered(2)), "s-a")
    link.deliver()
    assert came == [answered(1), answered(2)]


def test_an_agent_is_answered_before_all_it_said_is_dealt_with_and_the_rest_comes_in_the_next_rounds() -> None:
    network, clock = Network(random.Random(0)), Clock()
    agent, heard = network.carrier(), list[int]()
    agent.subscribe("eroica.waves.to.*", lambda subject, data: heard.append(wire.read_frame(data).heard))
    link = CoordinatorLink(network.carrier(), job="waves", clock=clock, say=lambda text: None)
    came: list[bus.Message] = []

    def slowly(message: bus.Message) -> None:
        agent.deliver()
        assert heard == [9]
        clock.now_ns += 100_000_000
        came.append(message)

    link.subscribe(SAID, slowly)
    everything = [answered(number) for number in range(1, 10)]
    link.take(told(*everything), "s-a")
    rounds = 0
    while not rounds or link.is_behind:
        link.deliver()
        rounds += 1
    assert came == everything and rounds == 3


@pytest.mark.parametrize(("world_size", "least", "most"), [(16, 90, 100), (100_000, 2, 4)])
def test_agents_of_a_large_job_say_less_often_how_far_ranks_are_and_at_once_that_one_has_died(
    world_size: int, least: int, most: int
) -> None:
    network, clock = Network(random.Random(0)), Clock()
    frames: list[wire.Frame] = []
    network.carrier().subscribe("eroica.waves.up.*", lambda subject, data: frames.append(wire.read_frame(data)))
    agent = AgentLink(network.carrier(), job="waves", host="a", clock=clock, say=lambda text: None)

    def go(count: int, is_alive: bool = True) -> None:
        clock.now_ns += 100_000_000
        for rank in range(8):
            agent.publish(replace(standing(rank, count), world_size=world_size, is_alive=is_alive or rank > 0))
        agent.deliver()
        network.carriers[0].deliver()

    for count in range(200):
        go(count)
    assert least <= len(frames) <= most
    go(200)
    go(201, is_alive=False)
    go(202, is_alive=False)
    go(203, is_alive=False)
    died = [wire.read_message(kind, data, bus.TO_COORDINATOR) for frame in frames[-2:] for kind, data in frame.loose]
    assert any(isinstance(one, Standing) and not one.is_alive for one in died)


def test_agents_that_join_and_hosts_that_fall_silent_are_told_once_each_and_none_with_another_agent() -> None:
    clock = Clock()
    link = CoordinatorLink(Network(random.Random(0)).carrier(), job="waves", clock=clock, say=lambda text: None)
    came: list[bus.Message] = []
    link.subscribe((bus.Silent, bus.Joined), came.append)
    frame = wire.read_frame(told())
    for host, session in (("a", "s-a"), ("b", "s-b"), ("b", "s-b2"), ("c", "s-c")):
        link.take(wire.write_frame(msgspec.structs.replace(frame, host=host, session=session)), session)
    clock.now_ns += 7_000_000_000
    link.take(wire.write_frame(msgspec.structs.replace(frame, host="b", session="s-b2")), "s-b2")
    clock.now_ns += 2_000_000_000
    for _ in range(3):
        link.deliver()
    joined = [bus.Joined(host=host) for host in "abbc"]
    assert came == [*joined, bus.Silent(host="a"), bus.Silent(host="c")], "a second agent of a host is new, too"


def test_a_frame_under_the_name_of_another_sender_is_refused() -> None:
    said: list[str] = []
    link, came = coordinator_end(said)
    link.take(told(answered(1)), "s-b")
    link.deliver()
    assert came == [] and link.refused.num == 1


@pytest.mark.parametrize("version", [1, 2])
def test_fields_and_kinds_of_the_next_version_are_left_out(version: int) -> None:
    link, came = coordinator_end([])
    message = msgspec.msgpack.decode(wire.write_message(answered(1))[1]) | {"mood": "bright"}
    plain = [version, "a", "s-a", 0, "", 0, 1, [["Answered", message], ["Sang", {"song": 3}]], [], "more"]
    link.take(msgspec.msgpack.encode(plain), "s-a")
    link.deliver()
    assert came == [answered(1)] and link.refused.num == 1


def test_a_frame_of_two_versions_ahead_is_refused_and_the_way_out_is_said() -> None:
    said: list[str] = []
    link, came = coordinator_end(said)
    link.take(told(answered(1), version=3), "s-a")
    link.deliver()
    assert came == [] and "version 3" in said[0] and "install one release" in said[0]


def test_an_agent_tells_a_new_coordinator_what_the_old_one_has_not_heard_and_where_its_ranks_are() -> None:
    network = Network(random.Random(3))
    ends, agents, reception, _ = over(network)
    agents[0].publish(standing(0, 40))
    agents[0].publish(answered(1))
    ends.rounds(lambda: agents[0].is_told)
    network.is_cut = True
    agents[0].publish(answered(2))
    ends.rounds(lambda: not agents[0].is_heard)
    reception.forget("waves")
    came: list[bus.Message] = []
    old = reception._on_job  # the next coordinator is another process; here it has the same connection

    def start(link: CoordinatorLink) -> None:
        old(link)
        link.subscribe(SAID, came.append)

    reception._on_job = start
    network.is_cut = False
    ends.rounds(lambda: agents[0].is_told and len(came) >= 2)
    assert answered(2) in came and answered(1) not in came and standing(0, 40) in came


def test_what_was_heard_of_an_agent_is_not_told_twice_though_it_was_cut_off_for_longer_than_it_is_remembered() -> None:
    network = Network(random.Random(3))
    ends, agents, reception, _ = over(network)
    coordinator, came = ends.coordinator, list[bus.Message]()
    assert isinstance(coordinator, CoordinatorLink)
    coordinator.subscribe((Answered,), came.append)
    agents[0].publish(answered(1))
    agents[0].deliver()
    network.is_cut = True  # it is heard, and does not hear so
    reception.deliver()
    assert came == [answered(1)] and not agents[0].is_told
    ends.rounds(lambda: not coordinator.hosts)
    network.is_cut = False
    agents[0].publish(answered(2))
    ends.rounds(lambda: agents[0].is_told)
    assert came == [answered(1), answered(2)]


def test_an_agent_may_not_leave_before_it_has_said_where_its_ranks_are() -> None:
    ends, agents, *_ = over(Network(random.Random(3)))
    agent = agents[0]
    agent.publish(answered(1))
    ends.rounds(lambda: agent.is_told)
    agent.publish(replace(standing(0, 9), is_alive=False))
    assert not agent.is_told
    ends.rounds(lambda: agent.is_told)


def test_what_was_published_before_anybody_listened_is_not_lost() -> None:
    network = Network(random.Random(4))
    network.is_cut = True
    clock = Clock()
    agent = AgentLink(network.carrier(), job="waves", host="a", clock=clock, say=print)
    for number in range(1, 4):
        agent.publish(answered(number))
        clock.now_ns += 10**10
        agent.deliver()
    network.is_cut = False
    link = CoordinatorLink(network.carrier(), job="waves", clock=clock, say=print)
    came: list[bus.Message] = []
    link.subscribe(SAID, came.append)
    listener = network.carrier()
    listener.subscribe("eroica.waves.up.*", lambda subject, data: link.take(data, subject.rpartition(".")[2]))
    for _ in range(200):
        clock.now_ns += 10**8
        agent.deliver()
        listener.deliver()
        link.deliver()
    assert came == [answered(1), answered(2), answered(3)] and agent.is_told


def test_an_agent_that_nobody_hears_keeps_within_its_memory_and_says_what_it_gives_up() -> None:
    network, said = Network(random.Random(5)), list[str]()
    network.is_cut = True
    ends_of = AgentLink(network.carrier(), job="waves", host="a", clock=Clock(), say=said.append)
    for number in range(6_000):
        ends_of.publish(answered(number % 65_535 + 1))
        ends_of.deliver()
    assert ends_of.num_dropped == 6_000 - 4_096 and len(said) == 1 and "given up" in said[0]


def test_a_message_that_is_too_large_is_replaced_by_one_that_says_so() -> None:
    ends, _, _, _ = over(Network(random.Random(6)))
    came: list[bus.Message] = []
    ends.coordinator.subscribe(SAID, came.append)
    stack = tuple(Frame(f"f{k}", "/x" * 100 + ".py", k) for k in range(4_000))
    view = RankView(rank=3, host="a", threads=(Thread("main", stack),), exception="x")
    ends.agents[0].publish(bus.Looked(look=1, host="a", views=(view,)))
    ends.rounds(lambda: bool(came))
    (looked,) = came
    assert isinstance(looked, bus.Looked) and looked.views[0].exception == "x" and not looked.views[0].threads
    assert "too large" in looked.notes[0]


def test_a_sentence_that_is_too_long_is_cut_and_ends_no_coordinator() -> None:
    ends, *_ = over(Network(random.Random(1)))
    came: list[bus.Message] = []
    ends.agents[0].subscribe((bus.Said,), came.append)
    ends.agents[0].publish(bus.Leaving(host="a"))  # so that it is heard before
    heard: list[bus.Message] = []
    ends.coordinator.subscribe((bus.Leaving,), heard.append)
    ends.rounds(lambda: bool(heard))
    ends.coordinator.publish(bus.Said(text="why each of 100,000 ranks left nothing " * 50_000))
    ends.rounds(lambda: bool(came))
    (said,) = came
    assert isinstance(said, bus.Said) and said.text.startswith("why each of") and said.text.endswith(" ...")


def test_an_agent_that_is_silent_is_told_once_and_heard_again_when_it_is_back() -> None:
    network = Network(random.Random(8))
    ends, _, _, clock = over(network)
    came: list[bus.Message] = []
    ends.coordinator.subscribe((bus.Silent,), came.append)
    assert isinstance(ends.coordinator, CoordinatorLink)
    coordinator = ends.coordinator
    network.is_cut = True
    until_ns = clock.now_ns + 20 * 10**9
    ends.rounds(lambda: clock.now_ns > until_ns)
    assert came == [bus.Silent(host="a"), bus.Silent(host="b")] and not any(coordinator.hosts.values())
    network.is_cut = False
    ends.rounds(lambda: all(coordinator.hosts.values()))


def test_a_pass_is_for_its_owner_alone_and_says_no_secret_when_it_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "waves.pass"
    ticket = Pass(url="nats://127.0.0.1:4222", user="job-waves", password="s3cret", job="waves")
    ticket.save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and load_pass(path) == ticket
    assert "s3cret" not in repr(ticket)
    path.chmod(0o644)
    with pytest.raises(UserError, match="chmod 600"):
        load_pass(path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"url": 3}', '{"url": "http://127.0.0.1:1"}', "\udcff"])
def test_a_file_that_is_no_pass_is_refused_in_a_sentence(tmp_path: Path, text: str) -> None:
    path = tmp_path / "odd.pass"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    path.chmod(0o600)
    with pytest.raises(UserError):
        load_pass(path)


def test_the_environment_names_a_pass_or_holds_a_url_and_no_secret_crosses_a_network_in_the_clear() -> None:
    assert find_pass({}) is None
    found = find_pass({"EROICA_COORDINATOR": "tls://me:s%40cret@hub.example:4222,tls://two:1", "EROICA_JOB": "waves"})
    assert found is not None and found.urls == ["tls://hub.example:4222", "tls://two:1"]
    assert (found.user, found.password, found.job) == ("me", "s@cret", "waves")
    with pytest.raises(UserError, match="write tls://"):
        find_pass({"EROICA_COORDINATOR": "nats://me:secret@10.0.0.1:4222"})
    with pytest.raises(UserError, match="certificate"):
        Listening(host="10.0.0.1")


@pytest.mark.parametrize(
    "url", ["nats://[::1", "nats://a:b@[::1:4222", "nats://a:b@\u2100:1", "nats://a:b@localhost:x"]
)
def test_an_address_that_is_none_is_refused_in_a_sentence_and_its_secret_is_not_said(url: str) -> None:
    with pytest.raises(UserError, match="is no address of a bus") as refused:
        find_pass({"EROICA_COORDINATOR": url})
    assert "a:b" not in str(refused.value)


def test_a_secret_is_read_once_where_the_url_names_several_servers() -> None:
    found = find_pass({"EROICA_COORDINATOR": "tls://me:a%2541@one:4222,tls://two:4222"})
    assert found is not None and (found.user, found.password) == ("me", "a%41")


def test_a_pass_may_hold_all_certificates_that_a_host_trusts(tmp_path: Path) -> None:
    bundle = "-----BEGIN CERTIFICATE-----\n" * 10_000  # 280 kB, as /etc/ssl/certs/ca-certificates.crt has
    Pass(url="tls://one:4222", password="s", ca=bundle).save(tmp_path / "a.pass")
    assert load_pass(tmp_path / "a.pass").ca == bundle


def test_no_name_of_a_job_widens_what_its_agents_may_say() -> None:
    for name in ("a.b", "a>", "*x", "", "a b", "é"):
        with pytest.raises(UserError):
            permissions(name)
    assert permissions("waves")["publish"] == {"allow": ["eroica.waves.up.*"]}
    assert permissions(ALL_JOBS)["publish"] == {"allow": ["eroica.*.up.*"]}

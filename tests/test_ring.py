"""The flight ring: what a reader sees of a writer that runs, laps it, tears a record, or is killed."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eroica import ring as flight
from eroica.errors import DataError, UserError
from eroica.ring import COLLECTIVE, NEXT, OPS, Position, Record, Ring, post, read_flight, what

WRITER = """
import sys
from pathlib import Path
from time import monotonic_ns
from eroica.ring import COLLECTIVE, Ring

ring = Ring.create(Path(sys.argv[1]), rank=3, world_size=8, capacity=1000)
print("writing", flush=True)
while True:
    begin_ns = monotonic_ns()
    number = ring.begin(COLLECTIVE, begin_ns, -1, 7, 0, 0, 0)
    ring.end(number, monotonic_ns() - begin_ns, False)
"""


@contextmanager
def _ring(capacity: int = 8) -> Iterator[Ring]:
    with TemporaryDirectory() as folder:
        ring = Ring.create(Path(folder) / "rank3.ring", rank=3, world_size=8, generation=1, capacity=capacity)
        yield ring
        ring.close()


def _begin(ring: Ring, sequence: int, kind: int = COLLECTIVE) -> int:
    return ring.begin(what(kind, 2, 1), 1000 + sequence, -1, 2**64 - 1, sequence, 4 * sequence, 5)


def test_a_record_is_read_as_it_was_written() -> None:
    with _ring() as ring:
        number = ring.begin(what(flight.P2P, 18, 3, flight.UNTIMED), 12, 6, 77, 41, 1 << 40, 2**32 + 9)
        assert read_flight(ring.path).records == [
            Record(number, 12, None, False, flight.P2P, 18, 3, flight.UNTIMED, 6, 77, 41, 1 << 40, 9)
        ]
        ring.end(number, 5_000_000, True)
        (record,) = read_flight(ring.path).records
        assert (record.duration_ns, record.raised) == (5_000_000, True)


def test_identity_counters_notes_and_mailbox_reach_the_other_side() -> None:
    with _ring() as ring:
        ring.set(flight.NUM_STEPS, 12)
        ring.add(flight.NUM_STEPS, 1)
        assert ring.note(group="7", name="día") and ring.note(fault="x")
        seen = read_flight(ring.path)
        assert (seen.words[flight.RANK], seen.words[flight.WORLD_SIZE], seen.words[flight.NUM_STEPS]) == (3, 8, 13)
        assert seen.words[flight.STATE] == flight.ARMED
        assert seen.notes == [{"group": "7", "name": "día"}, {"fault": "x"}]
        assert (seen.identity.pid, seen.identity.generation, seen.identity.capacity) == (os.getpid(), 1, 8)
        assert flight.is_alive(seen.identity) is True
        assert ring.mailbox == 0
        post(ring.path, 2**64 - 2)
        assert ring.mailbox == 2**64 - 2
        assert os.stat(ring.path).st_mode & 0o777 == 0o600


@given(st.lists(st.one_of(st.none(), st.integers(0, 30), st.just(-1)), max_size=60), st.integers(1, 9))
def test_a_reader_sees_the_last_records_whatever_the_order_of_beginnings_and_ends(
    moves: list[int | None], capacity: int
) -> None:
    """None begins a span; a number ends the span that many back, perhaps long overwritten; -1 reads and compares."""
    with _ring(capacity) as ring:
        model: dict[int, int | None] = {}
        for move in [*moves, -1]:
            if move is None:
                number = _begin(ring, len(model) + 1)
                model[number] = None
            elif move >= 0 and len(model) - move in model:
                ring.end(len(model) - move, 17 + move, False)
                model[len(model) - move] = 17 + move
            elif move == -1:
                seen = read_flight(ring.path)
                kept = list(model)[-capacity:]
                assert [record.number for record in seen.records] == kept
                assert all(record.sequence == record.number for record in seen.records)
                # The late end of an overwritten span may hide the end of the one in its place, never make one up.
                for record in seen.records:
                    assert record.duration_ns in (model[record.number], None)
                assert seen.num_torn == 0


@given(st.integers(1, 51), st.integers(0, 20))
def test_a_record_cut_off_in_the_middle_is_left_out_and_counted(cut: int, before: int) -> None:
    with _ring() as ring:
        for sequence in range(before):
            ring.end(_begin(ring, sequence), 5, False)
        path = ring.path
        old = path.read_bytes()
        number = _begin(ring, before)
        at = flight._RECORDS_AT + number % 8 * 64
        new = path.read_bytes()
        with open(path, "r+b") as file:
            file.seek(at)
            file.write(new[at : at + cut] + old[at + cut : at + 64])
        seen = read_flight(path)
        assert [record.number for record in seen.records] == list(range(max(1, number - 7), number))
        assert seen.num_torn == 1


def test_odd_durations_are_ends_and_an_end_that_cannot_be_seen_is_none() -> None:
    with _ring() as ring:
        for duration in (0, -5, flight.UNSEEN):
            ring.end(_begin(ring, 1), duration, False)
        assert [record.duration_ns for record in read_flight(ring.path).records] == [1, 1, None]
        assert read_flight(ring.path).records[2].flags == flight.UNTIMED


def test_threads_write_side_by_side_without_a_lock() -> None:
    with _ring(4000) as ring:

        def work(base: int) -> None:
            for sequence in range(base, base + 500):
                ring.end(_begin(ring, sequence), sequence, False)

        threads = [threading.Thread(target=work, args=(1000 * index + 1,)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seen = read_flight(ring.path)
        assert [record.number for record in seen.records] == list(range(1, 2001))
        assert all(record.duration_ns == record.sequence for record in seen.records)
        assert len({record.sequence for record in seen.records}) == 2000


def test_notes_that_find_no_room_are_counted_and_do_no_harm() -> None:
    with _ring() as ring:
        while ring.note(text="x" * 5000):
            pass
        number = _begin(ring, 1)
        seen = read_flight(ring.path)
        assert [record.number for record in seen.records] == [number]
        assert len(seen.notes) == 12
        assert seen.words[flight.LOST_NOTES] == 1


@pytest.mark.parametrize("num_lookups", [20])
def test_a_writer_that_is_killed_leaves_all_but_at_most_its_last_record(tmp_path: Path, num_lookups: int) -> None:
    path = tmp_path / "rank3.ring"
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None and writer.stdout.readline()
        last = 0
        for _ in range(num_lookups):  # while it writes, and laps us
            seen = read_flight(path)
            assert flight.is_alive(seen.identity)
            numbers = [record.number for record in seen.records]
            assert numbers == sorted(set(numbers)) and (not numbers or numbers[-1] >= last)
            assert all(record.begin_ns > 0 and record.group == 7 for record in seen.records)
            last = max([last, *numbers])
        writer.kill()
    seen = read_flight(path)
    numbers = [record.number for record in seen.records]
    assert numbers[-1] >= last and seen.num_torn <= 1
    assert numbers == list(range(numbers[-1] - len(numbers) + 1, numbers[-1] + 1))
    assert len(numbers) >= min(999, numbers[-1])
    assert all(record.duration_ns is not None for record in seen.records[:-1])
    assert flight.is_alive(seen.identity) is False


def test_files_that_are_no_sound_ring_are_refused_in_one_sentence(tmp_path: Path) -> None:
    with _ring() as ring:
        whole = ring.path.read_bytes()
    path = tmp_path / "rank0.ring"
    newer = whole[:8] + (2).to_bytes(4, "little") + whole[12:]
    flipped = whole[:30] + bytes([whole[30] ^ 1]) + whole[31:]
    for content, words in (
        (b"", "not a flight ring"),
        (b"{}", "not a flight ring"),
        (newer, "version 2 and this eroica reads 1; update eroica"),
        (whole[:100], "damaged"),
        (whole[:-1], "damaged"),
        (flipped, "damaged"),
    ):
        path.write_bytes(content)
        with pytest.raises(DataError, match=words):
            read_flight(path)
    os.unlink(path)
    os.mkfifo(path)
    with pytest.raises(DataError, match="plain file"):
        read_flight(path)


@given(st.binary(max_size=300), st.integers(0, flight._RECORDS_AT + 8 * 64 - 1))
def test_damage_anywhere_is_refused_or_read_around(noise: bytes, at: int) -> None:
    with _ring() as ring:
        for sequence in range(1, 12):
            ring.end(_begin(ring, sequence, NEXT), 5, False)
        ring.note(host="a")
        with open(ring.path, "r+b") as file:
            file.seek(at)
            file.write(noise)
        try:
            seen = read_flight(ring.path)
        except DataError:
            assert at < 256
        else:
            assert all(record.sequence == record.number and record.kind == NEXT for record in seen.records)


def test_a_ring_is_not_made_where_it_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="1 to 32768 records, not 0"):
        Ring.create(tmp_path / "a.ring", rank=0, world_size=1, capacity=0)
    with pytest.raises(OSError):
        Ring.create(tmp_path / "absent" / "a.ring", rank=0, world_size=1)
    assert list(tmp_path.iterdir()) == []


def _step(writer: flight.Ring, number: int) -> int:
    """A step that begins."""
    return writer.begin(flight.what(flight.STEP), number, -1, 0, number, 0, number)


def test_a_reader_that_comes_again_takes_only_what_is_new(tmp_path: Path) -> None:
    writer = flight.Ring.create(tmp_path / "a.ring", rank=3, world_size=4, capacity=512)
    tail = flight.Tail(writer.path)
    first = _step(writer, 1)
    writer.note(host="a")
    news = tail.poll()
    assert [record.number for record in news.begun] == [first] and not news.ended
    assert news.notes == [{"host": "a"}] and news.words[flight.RANK] == 3
    writer.end(first, 25, False)
    second = _step(writer, 2)
    writer.end(second, 30, True)
    news = tail.poll()
    assert [record.number for record in news.begun] == [second] and not news.notes
    assert {record.number: record.duration_ns for record in news.ended} == {first: 25, second: 30}
    assert tail.poll().begun == []


def test_a_reader_that_was_lapped_says_how_much_it_has_lost_and_goes_on(tmp_path: Path) -> None:
    writer = flight.Ring.create(tmp_path / "a.ring", rank=0, world_size=1, capacity=512)
    tail = flight.Tail(writer.path)
    tail.poll()
    for number in range(5000):
        writer.end(_step(writer, number), 5, False)
    news = tail.poll()
    assert news.num_lost + len(news.begun) == 5000 and news.begun[-1].number == 5000
    assert [record.number for record in news.begun] == list(range(news.num_lost + 1, 5001))


def test_what_one_thread_has_not_written_yet_is_waited_for_once_and_then_given_up(tmp_path: Path) -> None:
    writer = flight.Ring.create(tmp_path / "a.ring", rank=0, world_size=1, capacity=512)
    tail = flight.Tail(writer.path)
    for number in range(3):
        _step(writer, number)
    whole = writer.path.read_bytes()
    at = whole.index(struct.pack("<Q", 2), 65536)
    with writer.path.open("r+b") as file:  # record 2 is half written
        file.seek(at + 8)
        file.write(b"\xff" * 8)
    assert [record.number for record in tail.poll().begun] == [1]
    news = tail.poll()
    assert [record.number for record in news.begun] == [3] and news.num_lost == 1


def test_what_is_never_written_at_the_last_place_of_the_ring_is_given_up_too(tmp_path: Path) -> None:
    writer = flight.Ring.create(tmp_path / "a.ring", rank=0, world_size=1, capacity=512)
    tail = flight.Tail(writer.path)
    for number in range(510):
        _step(writer, number)
    assert len(tail.poll().begun) == 510
    with pytest.raises(struct.error):
        writer.begin(flight.what(flight.STEP), 2**63, -1, 0, 511, 0, 0)  # takes its number, and writes nothing
    _step(writer, 512)
    assert not tail.poll().begun
    news = tail.poll()
    assert [record.number for record in news.begun] == [512] and news.num_lost == 1


def test_a_span_whose_end_cannot_be_seen_is_not_waited_for(tmp_path: Path) -> None:
    writer = flight.Ring.create(tmp_path / "a.ring", rank=0, world_size=1, capacity=512)
    tail = flight.Tail(writer.path)
    number = _step(writer, 1)
    tail.poll()
    writer.end(number, flight.UNSEEN, False)
    assert not tail.poll().ended
    writer.end(number, 5, False)
    assert not tail.poll().ended


@given(st.lists(st.sampled_from(["begin", "end", "poll"]), max_size=200))
def test_whatever_the_order_every_record_comes_once_and_every_end_after_it(moves: list[str]) -> None:
    with TemporaryDirectory() as folder:
        writer = flight.Ring.create(Path(folder) / "a.ring", rank=0, world_size=1, capacity=4096)
        tail = flight.Tail(writer.path)
        begun: list[int] = []
        ended: list[int] = []
        open_ones: list[int] = []
        for move in [*moves, "poll"]:
            if move == "begin":
                open_ones.append(_step(writer, 1))
            elif move == "end" and open_ones:
                writer.end(open_ones.pop(0), 7, False)
            elif move == "poll":
                news = tail.poll()
                begun += [record.number for record in news.begun]
                ended += [record.number for record in news.ended]
                assert set(ended) <= set(begun)
        assert begun == list(range(1, len(begun) + 1)) and len(ended) == len(set(ended))
        assert set(begun) - set(ended) == set(open_ones)
        tail.close()
        writer.close()


def test_a_ring_that_is_cut_short_is_refused_in_one_sentence(tmp_path: Path) -> None:
    writer = flight.Ring.create(tmp_path / "a.ring", rank=0, world_size=1, capacity=512)
    tail = flight.Tail(writer.path)
    os.truncate(writer.path, 100)
    with pytest.raises(DataError, match="cut to 100 bytes"):
        tail.poll()
    with pytest.raises(DataError, match="not a flight ring"):
        flight.Tail(writer.path)


def test_a_position_holds_the_last_call_of_a_group_and_slots_run_out_without_harm() -> None:
    with _ring() as ring:
        places = [ring.position(2**64 - 1 - index, index - 1) for index in range(flight.MOST_POSITIONS)]
        assert len(set(places)) == flight.MOST_POSITIONS and ring.position(5) == 0
        assert read_flight(ring.path).positions == []  # nothing was entered yet
        for place, op in ((places[0], OPS.index("allreduce")), (places[31], OPS.index("send"))):
            for sequence in (40, 41):
                ring.words[place + flight.NUM_BYTES] = 1 << 40
                ring.words[place + flight.BEGIN] = 1000 + sequence
                ring.words[place + flight.ENTERED] = sequence << 8 | op
        ring.words[places[0] + flight.DONE] = 40
        _begin(ring, 1)
        seen = read_flight(ring.path)
        first, last = seen.positions
        assert first == Position(2**64 - 1, -1, OPS.index("allreduce"), 41, 40, 1 << 40, 1041)
        assert (last.group, last.peer, last.sequence, last.done) == (2**64 - 32, 30, 41, 0)
        assert (first.as_record().kind, last.as_record().kind) == (COLLECTIVE, flight.P2P)
        assert first.as_record().flags == flight.UNTIMED and first.as_record().begin_ns == 1041
        assert len(seen.records) == 1 and seen.notes == []
        tail = flight.Tail(ring.path)
        assert tail.positions() == [first, last]
        tail.close()

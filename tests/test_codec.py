"""The wire form of a summary: small always, near lossless, and deaf to damaged input (design sections 2, 10 and 11)."""

from __future__ import annotations

import tracemalloc
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.fleet import Fleet
from eroica.codec import (
    MAX_LEDGER_BYTES,
    MAX_PATTERN_BYTES,
    EncodedSummary,
    decode_summary,
    encode_summary,
    read_summaries,
    read_summary,
    write_summary,
)
from eroica.collectives import MAX_GROUPS, MAX_ITERATIONS, MAX_SAMPLES, Channel, Ledger, join, sample
from eroica.context import Context
from eroica.critical_path import NUM_ACTIVITIES, Activity
from eroica.diagnosis import diagnose
from eroica.errors import DataError
from eroica.findings import to_json
from eroica.job import ProcessGroup
from eroica.names import Phase
from eroica.packing import (
    MAX_NAME_BYTES,
    MOST_KEPT_MEMBERS,
    digest,
    members,
    members_text,
    pack_durations,
    pack_ints,
    unpack_durations,
)
from eroica.pattern import MAX_FUNCTIONS, Coverage, Function, Patterns, Summary, stack, summarize
from eroica.trace import CollectiveKind, read_trace
from eroica.utilisation import MU_SOURCES
from evals.synth import cluster
from tests import handmade as h
from tests.traces import TRACES

REAL = sorted(TRACES.rglob("*.json.gz"))


def decoded(encoded: EncodedSummary) -> Summary:
    return decode_summary(encoded.patterns, encoded.ledger, encoded.names)


def random_ledger(rng: np.random.Generator, num_functions: int, full: bool) -> Ledger:
    """A ledger within its limits; `full`: each limit is reached and no two samples are alike."""

    def size(most: int) -> int:
        return most if full else int(rng.integers(0, most + 1))

    iterations, num_channels = size(MAX_ITERATIONS), size(MAX_GROUPS)
    samples = size(MAX_SAMPLES) if num_channels else 0

    def seconds(count: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        values = 10.0 ** rng.uniform(-8, 3, count)
        values[rng.random(count) < 0.1] = 0.0
        return values.astype(np.float32)

    step = np.sort(rng.integers(0, 10**9, samples)) if full else np.sort(rng.integers(0, 50, samples))
    return Ledger(
        steps=np.sort(rng.integers(0, 10**12, iterations)),
        length_s=seconds(iterations),
        own_s=seconds(iterations),
        exposed_s=seconds(iterations),
        waiting_s=seconds(iterations),
        top_function=rng.integers(-1, num_functions, iterations).astype(np.int32)
        if num_functions
        else np.full(iterations, -1, np.int32),
        top_excess_s=seconds(iterations),
        top_by_work=np.where(rng.random(iterations) < 0.3, np.nan, rng.random(iterations)).astype(np.float32),
        channels=tuple(Channel(f"{k}-{k + 7}", f"mesh {k}", 8) for k in range(num_channels)),
        channel_count=rng.random(num_channels).astype(np.float32),
        channel_exposed_s=seconds(num_channels),
        channel_bytes=np.where(rng.random(num_channels) < 0.3, np.nan, rng.random(num_channels) * 1e12),
        step=step,
        channel=rng.integers(0, max(num_channels, 1), samples).astype(np.int32),
        position=rng.integers(0, 32768 if full else 200, samples).astype(np.int32),
        kind=rng.choice(list(CollectiveKind) if full else [1, 2], samples).astype(np.uint8),
        check=rng.integers(0, 65536 if full else 3, samples),
        work_before_s=seconds(samples),
        duration_s=seconds(samples),
        sample_exposed_s=seconds(samples),
        in_flight=np.minimum(rng.integers(0, 4, samples), np.arange(samples)).astype(np.int32),
        complete_steps=np.unique(step)[::2],
        dropped_channels=int(rng.integers(0, 9)),
    )


def random_summary(seed: int, full: bool = False) -> Summary:
    """A summary within its limits."""
    rng = np.random.default_rng(seed)
    count = MAX_FUNCTIONS if full else int(rng.integers(0, MAX_FUNCTIONS + 1))
    functions = tuple(
        Function(
            Activity(int(rng.integers(0, NUM_ACTIVITIES))),
            f"kernel {k}",
            f"a{k}.py:{k}" if full or rng.random() < 0.5 else None,
            f"b{k}.py:{k}" if full or rng.random() < 0.5 else None,
            Phase(int(rng.integers(0, len(Phase)))),
            None,
            f"step {k}" if full else None,
        )
        for k in range(count)
    )
    beta = np.sort(rng.random(count) / 40)[::-1].astype(np.float32)
    maybe = np.where(rng.random(count) < 0.3, np.nan, rng.random(count)).astype(np.float32)
    num_groups = 40 if full else int(rng.integers(0, 5))
    return Summary(
        rank=int(rng.integers(0, 10**6)),
        world_size=None if rng.random() < 0.3 else 10**6,
        host=f"host{seed}",
        device_model="H100",
        groups=tuple(ProcessGroup(f"{k}", f"group {k}", tuple(range(k, k + 64, 8)), 8) for k in range(num_groups)),
        steps_by="ProfilerStep",
        window_s=float(rng.random()),
        started_ns=None if rng.random() < 0.3 else int(rng.integers(0, 2**62)),
        num_iterations=int(rng.integers(0, 10**6)),
        patterns=Patterns(
            functions=functions,
            beta=beta,
            mu=maybe,
            sigma=maybe[::-1].copy(),
            mu_source=rng.integers(0, len(MU_SOURCES), count).astype(np.uint8),
            count=rng.random(count).astype(np.float32),
            work=np.round(maybe.astype(np.float64) * 1e6),
            cutoff=float(rng.random()) / 1e4,
            activity_beta=rng.random(NUM_ACTIVITIES).astype(np.float32),
            threads=tuple((f"thread {k}", float(np.float32(rng.random()))) for k in range(8)),
        ),
        ledger=random_ledger(rng, count, full),
        coverage=Coverage(
            num_events=int(rng.integers(0, 2**40)),
            num_kernels=1,
            num_launches=2,
            num_collectives=3,
            explained=float(np.float32(rng.random())),
            has_device=bool(rng.random() < 0.5),
            partial=bool(rng.random() < 0.5),
            epoch=bool(rng.random() < 0.5),
            notes=tuple(f"note {k} of {seed}" for k in range(30 if full else 2)),
        ),
    )


# --- what is kept --------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(1e-9, 1e5), max_size=50))
def test_durations_come_back_within_a_thousandth(values: list[float]) -> None:
    there_and_back = unpack_durations(pack_durations(np.array(values)))
    np.testing.assert_allclose(there_and_back, values, rtol=1e-3)


def test_no_duration_and_an_unknown_one_stay_what_they_are() -> None:
    there_and_back = unpack_durations(pack_durations(np.array([0.0, np.nan, -1.0, 1e-12, 1e9, np.inf])))
    np.testing.assert_allclose(there_and_back, [0.0, np.nan, 0.0, 1e-9, 1e5, 1e5], rtol=1e-3)


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=50))
def test_packing_keeps_the_order_of_durations(values: list[float]) -> None:
    ordered = np.sort(np.array(values))
    assert (np.diff(pack_durations(ordered).astype(int)) >= 0).all()


@given(st.sets(st.integers(0, 10**6), max_size=60))
def test_members_of_a_group_come_back(ranks: set[int]) -> None:
    assert members(members_text(sorted(ranks))) == tuple(sorted(ranks))


def test_what_is_kept_of_the_lists_of_members_that_have_come_stays_small_whoever_sends_them() -> None:
    members("0-9")
    tracemalloc.start()
    for first in range(64):
        assert len(members(f"{first}-{first + 99_999}")) == 100_000
    kept = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert kept < 40 * MOST_KEPT_MEMBERS
    assert members("0-99999") is members("0-99999")


def test_long_texts_that_agents_send_are_not_kept() -> None:
    told = random_summary(4)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for number in range(100):
        host = f"{number:05}" + "h" * 59_995
        made = encode_summary(replace(told, host=host))
        assert decode_summary(made.patterns, made.ledger, made.names).host == host
    kept = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert kept < 10 * 60_000


def test_strided_groups_stay_short() -> None:
    assert members_text(range(3, 100_000, 8)) == "3-99995:8"
    assert members_text((0, 1, 2, 8, 16, 24, 31)) == "0-2,8-24:8,31"


@given(st.integers(0, 10**9))
def test_a_summary_comes_back_but_for_the_rounding_of_durations(seed: int) -> None:
    given_ = random_summary(seed)
    back = decoded(encode_summary(given_))
    for field in fields(Summary):
        if field.name not in ("patterns", "ledger"):
            assert getattr(back, field.name) == getattr(given_, field.name), field.name
    assert back.patterns.functions == given_.patterns.functions
    assert [f.phase for f in back.patterns.functions] == [f.phase for f in given_.patterns.functions]
    assert [f.user_function for f in back.patterns.functions] == [f.user_function for f in given_.patterns.functions]
    for name in ("beta", "mu", "sigma", "mu_source", "count", "work", "activity_beta"):
        np.testing.assert_array_equal(getattr(back.patterns, name), getattr(given_.patterns, name), err_msg=name)
    assert back.patterns.cutoff == given_.patterns.cutoff and back.patterns.threads == given_.patterns.threads
    assert back.ledger.channels == given_.ledger.channels
    for name in (
        "steps",
        "top_function",
        "step",
        "channel",
        "position",
        "kind",
        "check",
        "in_flight",
        "complete_steps",
    ):
        np.testing.assert_array_equal(getattr(back.ledger, name), getattr(given_.ledger, name), err_msg=name)
    for name in (
        "length_s",
        "own_s",
        "exposed_s",
        "waiting_s",
        "top_excess_s",
        "channel_count",
        "channel_exposed_s",
        "channel_bytes",
        "work_before_s",
        "duration_s",
        "sample_exposed_s",
    ):
        ours, theirs = getattr(back.ledger, name), getattr(given_.ledger, name)
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-9, err_msg=name)
        assert ours.dtype == theirs.dtype, name
    np.testing.assert_allclose(back.ledger.top_by_work, given_.ledger.top_by_work, atol=2e-3)


def test_the_same_summary_gives_the_same_bytes() -> None:
    assert encode_summary(random_summary(3)) == encode_summary(random_summary(3))


def test_a_file_holds_a_summary_with_its_texts() -> None:
    given_ = random_summary(5)
    assert read_summary(write_summary(given_)).patterns.functions == given_.patterns.functions


def test_texts_are_known_by_content_so_that_equal_functions_travel_once() -> None:
    first, second = encode_summary(random_summary(1)), encode_summary(random_summary(1))
    assert all(digest(text) == key for key, text in first.names.items())
    assert (
        decode_summary(first.patterns, first.ledger, {**second.names, b"12345678": b"else"}).rank
        == random_summary(1).rank
    )


@pytest.mark.parametrize("case", ["slow_input", "nic_slow", "last_stage_heavier_one_slow", "gc_rotating", "healthy"])
def test_a_diagnosis_from_decoded_summaries_is_the_same(case: str) -> None:
    made = cluster(case, effect=0.10, seed=1)
    summaries = [summarize(trace, samples) for trace, samples in made.traces()]
    ours = to_json(diagnose(stack(summaries), Context()))
    theirs = to_json(diagnose(stack([decoded(encode_summary(s)) for s in summaries]), Context()))
    assert ours["kind"] == theirs["kind"] and len(ours["findings"]) == len(theirs["findings"])
    for key in ("scope", "cause", "ranks", "hosts", "confidence"):
        assert ours["verdict"][key] == theirs["verdict"][key]
    for mine, yours in zip(ours["findings"], theirs["findings"], strict=True):
        assert mine["function"] == yours["function"]
        assert yours["impact"]["share"] == pytest.approx(mine["impact"]["share"], abs=2e-3)


# --- size ----------------------------------------------------------------------------------------------------------


@settings(max_examples=10)
@given(st.integers(0, 10**9))
def test_the_fullest_summary_fits_and_says_what_it_left_out(seed: int) -> None:
    given_ = random_summary(seed, full=True)
    encoded = encode_summary(given_)
    assert len(encoded.patterns) <= MAX_PATTERN_BYTES and len(encoded.ledger) <= MAX_LEDGER_BYTES
    back = decoded(encoded)
    kept = len(back.patterns.functions)
    assert back.patterns.functions == given_.patterns.functions[:kept] and kept >= 20
    assert back.patterns.cutoff == pytest.approx(float(given_.patterns.beta[kept]), rel=1e-6)
    assert (back.ledger.top_function < kept).all()
    note = back.coverage.notes[-1]
    assert f"{MAX_FUNCTIONS - kept} functions" in note and "20 process groups" in note
    assert f"{MAX_SAMPLES - len(back.ledger.kind)} sampled communications" in note
    assert "more notes" in back.coverage.notes[-2]


@pytest.mark.parametrize("path", REAL, ids=lambda path: str(Path(path).name))
def test_summaries_of_real_traces_fit_with_nothing_left_out(path: Path) -> None:
    given_ = summarize(read_trace(path))
    encoded = encode_summary(given_)
    assert len(encoded.patterns) <= MAX_PATTERN_BYTES and len(encoded.ledger) <= MAX_LEDGER_BYTES
    assert not any("left out of the summary" in note for note in decoded(encoded).coverage.notes)


def many_collectives(num_steps: int, per_step: int) -> Summary:
    events = []
    for step in range(num_steps):
        start = step * 10 * h.MS
        events.append(h.mark(f"ProfilerStep#{step}", start, 10 * h.MS))
        for k in range(per_step):
            comm = h.Comm(elements=1000 * k)
            at = start + (k + 1) * 9 * h.MS // per_step
            events.append(h.kernel("ncclDevKernel_AllReduce", at, 50_000 + k, comm=comm))
            events.append(h.kernel(f"gemm {k}", at + 60_000, 30_000))
    return summarize(h.trace(events))


def test_sixty_steps_with_thousands_of_collectives_fit_with_nothing_left_out() -> None:
    given_ = many_collectives(num_steps=70, per_step=50)
    assert given_.coverage.num_collectives == 3500 and len(given_.ledger.kind) == MAX_SAMPLES
    encoded = encode_summary(given_)
    assert len(encoded.patterns) <= MAX_PATTERN_BYTES and len(encoded.ledger) <= MAX_LEDGER_BYTES
    back = decoded(encoded)
    assert len(back.ledger.kind) == MAX_SAMPLES and back.coverage.notes == given_.coverage.notes


@settings(max_examples=10)
@given(st.integers(0, 10**9))
def test_samples_left_out_are_the_last_by_the_rule_that_all_ranks_share(seed: int) -> None:
    given_ = random_summary(seed, full=True).ledger
    back = decoded(encode_summary(replace(random_summary(seed, full=True), ledger=given_))).ledger
    chosen, _ = sample(given_.step, given_.channel, given_.position, given_.channels, len(back.kind))
    np.testing.assert_array_equal(back.step, given_.step[chosen])
    assert not np.isin(back.complete_steps, given_.step[~chosen]).any()


def test_work_before_a_sample_that_was_left_out_is_added_to_the_next_one() -> None:
    given_ = random_summary(11, full=True)
    one_step = replace(given_, ledger=replace(given_.ledger, step=np.zeros(MAX_SAMPLES, np.int64)))
    back = decoded(encode_summary(one_step)).ledger
    last = np.flatnonzero(np.isin(given_.ledger.check, back.check))[-1]
    assert len(back.kind) < MAX_SAMPLES
    assert back.work_before_s.sum() == pytest.approx(given_.ledger.work_before_s[: last + 1].sum(), rel=1e-3)


def test_ranks_that_left_out_different_samples_still_join() -> None:
    few, many = random_summary(1), random_summary(11, full=True)
    few = replace(few, ledger=replace(many.ledger, duration_s=many.ledger.duration_s * 2))
    joined = join([decoded(encode_summary(s)).ledger for s in (few, many)])
    assert not joined.not_joinable and len(joined.transfer_s) > 0


def test_an_endless_name_is_cut_alike_on_every_rank() -> None:
    key = ",".join(str(7 * k) for k in range(100_000))
    ledgers = []
    for rank in (0, 1):
        ranks = [h.Rank(samples=[h.Sample(0.1, channel=Channel(key, "odd", 2))])] * 2
        encoded = encode_summary(h.job(ranks)[rank])
        assert max(len(name) for name in encoded.names.values()) <= MAX_NAME_BYTES
        ledgers.append(decoded(encoded).ledger)
    assert ledgers[0].channels == ledgers[1].channels
    assert len(join(ledgers).transfer_s) == 8


def test_a_group_of_unordered_length_loses_its_members_but_not_its_size() -> None:
    scattered = tuple(int(r) for r in np.cumsum(np.random.default_rng(0).integers(1, 9, 30_000)))
    given_ = replace(random_summary(2), groups=(ProcessGroup("7", "odd", scattered, 30_000),))
    back = decoded(encode_summary(given_))
    assert back.groups == (ProcessGroup("7", "odd", (), 30_000),)
    assert "the members of 1 process groups" in back.coverage.notes[-1]


def test_more_than_a_summary_can_hold_is_the_callers_error() -> None:
    too_long = h.summary(0, h.Rank(), num_steps=MAX_ITERATIONS + 1)
    with pytest.raises(ValueError, match="more functions, iterations"):
        encode_summary(too_long)


# --- hostile input -------------------------------------------------------------------------------------------------


def try_decode(patterns: bytes, ledger: bytes, names: dict[bytes, bytes]) -> None:
    """Decodes or raises DataError with one sentence; anything else fails the test."""
    try:
        back = decode_summary(patterns, ledger, names)
    except DataError as error:
        assert "\n" not in str(error) and len(str(error)) < 300
    else:
        stack([back])


SOUND = encode_summary(random_summary(4))


@given(st.data())
def test_changed_bytes_decode_or_are_refused(data: st.DataObject) -> None:
    parts = [bytearray(SOUND.patterns), bytearray(SOUND.ledger)]
    for _ in range(data.draw(st.integers(1, 4))):
        part = data.draw(st.sampled_from(parts))
        part[data.draw(st.integers(0, len(part) - 1))] = data.draw(st.integers(0, 255))
    try_decode(bytes(parts[0]), bytes(parts[1]), SOUND.names)


@given(st.data())
def test_columns_full_of_extremes_decode_or_are_refused(data: st.DataObject) -> None:
    part = bytearray(data.draw(st.sampled_from([SOUND.patterns, SOUND.ledger])))
    at = data.draw(st.integers(8, len(part) - 1))
    size = data.draw(st.integers(1, len(part) - at))
    part[at : at + size] = bytes([data.draw(st.sampled_from([0, 1, 0x7F, 0x80, 0xFF]))]) * size
    is_ledger = bytes(part[:4]) == SOUND.ledger[:4]
    try_decode(SOUND.patterns if is_ledger else bytes(part), bytes(part) if is_ledger else SOUND.ledger, SOUND.names)


@given(st.data())
def test_cut_and_lengthened_parts_are_refused(data: st.DataObject) -> None:
    part = data.draw(st.sampled_from([SOUND.patterns, SOUND.ledger]))
    cut = data.draw(st.integers(0, len(part) - 1))
    for wrong in (part[:cut], part + b"\0", part[:4] + part[4:6] + (cut).to_bytes(2, "little") + part[8:cut]):
        with pytest.raises(DataError):
            if part is SOUND.patterns:
                decode_summary(wrong, SOUND.ledger, SOUND.names)
            else:
                decode_summary(SOUND.patterns, wrong, SOUND.names)


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_random_bytes_are_refused(patterns: bytes, ledger: bytes) -> None:
    with pytest.raises(DataError):
        decode_summary(patterns, ledger, {})
    with pytest.raises(DataError):
        decode_summary(SOUND.patterns, ledger, SOUND.names)
    with pytest.raises(DataError):
        read_summary(patterns)


@given(st.data())
def test_changed_files_are_read_or_refused(data: st.DataObject) -> None:
    file = bytearray(write_summary(random_summary(4)))
    file[data.draw(st.integers(0, len(file) - 1))] = data.draw(st.integers(0, 255))
    try:
        read_summary(bytes(file[: data.draw(st.integers(0, len(file)))]))
    except DataError as error:
        assert "\n" not in str(error)


@given(st.data())
def test_many_are_read_at_once_as_each_alone_whatever_lies_between_them(data: st.DataObject) -> None:
    files = [bytearray(write_summary(random_summary(data.draw(st.integers(0, 9))))) for _ in range(7)]
    files += [bytearray(write_summary(summary)) for summary in Fleet(8).summaries()]
    for file in data.draw(st.lists(st.sampled_from(files), max_size=5)):
        if file:
            file[data.draw(st.integers(0, len(file) - 1))] = data.draw(st.integers(0, 255))
        if data.draw(st.booleans()):
            del file[data.draw(st.integers(0, len(file))) :]
    wanted = [read_or_error(bytes(file)) for file in files]
    told = read_summaries([bytes(file) for file in files])
    for one, alone in zip(told, wanted, strict=True):
        if isinstance(one, DataError):
            assert str(one) == alone
        else:
            assert not isinstance(alone, str)
            assert_equal(one, alone)


def read_or_error(file: bytes) -> Summary | str:
    try:
        return read_summary(file)
    except DataError as error:
        return str(error)


def assert_equal(one: object, other: object) -> None:
    """Fields and arrays, all the way down; NaN is itself."""
    if isinstance(one, np.ndarray):
        assert isinstance(other, np.ndarray) and one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    elif is_dataclass(one) and not isinstance(one, type):
        assert type(one) is type(other)
        for field in fields(one):
            assert_equal(getattr(one, field.name), getattr(other, field.name))
    elif isinstance(one, tuple) and isinstance(other, tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_equal(a, b)
    else:
        assert one == other or (one != one and other != other)


def test_a_missing_text_and_a_newer_version_are_named() -> None:
    key = next(iter(SOUND.names))
    with pytest.raises(DataError, match=f"unknown text {key.hex()}"):
        decode_summary(SOUND.patterns, SOUND.ledger, {k: v for k, v in SOUND.names.items() if k != key})
    newer = SOUND.patterns[:4] + (9).to_bytes(2, "little") + SOUND.patterns[6:]
    with pytest.raises(DataError, match="version 9, this eroica reads version 1"):
        decode_summary(newer, SOUND.ledger, SOUND.names)


@pytest.mark.parametrize("text", ["0-999999999", "5-", "-5", "1-2-3", "0-9:0", "٣", "1e9", "0-9:-1", "a", " 1"])
def test_hostile_lists_of_ranks_cost_nothing(text: str) -> None:
    if text == "5-":
        assert members(text) == (5,)
        return
    with pytest.raises(DataError):
        members(text)


def test_decoding_needs_little_memory_whatever_the_bytes_say() -> None:
    hostile = b"0-99999"
    names = {key: hostile if b"-" in text and text[:1].isdigit() else text for key, text in SOUND.names.items()}
    tracemalloc.start()
    try_decode(SOUND.patterns, SOUND.ledger, names)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20e6


def test_texts_that_are_no_text_are_refused() -> None:
    key = next(iter(SOUND.names))
    for wrong in (b"\xff\xfe", b"x" * (MAX_NAME_BYTES + 1)):
        with pytest.raises(DataError):
            decode_summary(SOUND.patterns, SOUND.ledger, {**SOUND.names, key: wrong})


def test_integers_of_any_size_keep_their_distance() -> None:
    extremes = np.array([-(2**63), 0, 2**63 - 1])
    assert len(pack_ints(extremes)) == 9 + 24 and len(pack_ints(np.arange(10**12, 10**12 + 200))) == 9 + 200

"""The reasoning over a halted job: pure views in, a diagnosis out. Real processes are in `test_hang_live.py`."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from eroica.findings import Diagnosis, from_json, to_json
from eroica.hang import explain
from eroica.job import format_ranks, parse_ranks
from eroica.merged import lines, merge
from eroica.report import render_markdown, render_prompt, render_text
from eroica.standing import Call, Child, Frame, Group, Held, Open, RankView, Thread

WORLD = Group("a" * 16, "default_pg", (0, 1, 2, 3))
TORCH = "/v/lib/python3.11/site-packages/torch"


def _thread(*frames: Frame, **more: object) -> Thread:
    return replace(Thread("MainThread", frames, is_main=True), **more)  # type: ignore[arg-type]


def _reducing(line: int = 40) -> Thread:
    return _thread(
        Frame("all_reduce", f"{TORCH}/distributed/distributed_c10d.py", 3252),
        Frame("step", "/home/u/train.py", line, "dist.all_reduce(x)"),
    )


def _in(line: int, function: str = "decode") -> Thread:
    return _thread(Frame(function, "/home/u/data.py", line, "time.sleep(9)"))


def _call(sequence: int, status: str = "in", op: str = "allreduce", group: Group = WORLD, **more: object) -> Call:
    made = Call(group.key, sequence, op, status, 400, "float32", 60.0 if status == "in" else 90.0, 5)
    return replace(made, **more)  # type: ignore[arg-type]


def _rank(rank: int, *calls: Call, thread: Thread | None = None, groups: tuple[Group, ...] = (WORLD,)) -> RankView:
    return RankView(
        rank=rank, host="a", pid=100 + rank, state="running", groups=groups, calls=calls, knows_all_groups=True,
        silent_s=60.0, threads=(thread,) if thread is not None else (), num_steps=5,
    )  # fmt: skip


def _waiting(rank: int, sequence: int = 41, line: int = 40) -> RankView:
    return _rank(rank, _call(sequence - 1, "done"), _call(sequence), thread=_reducing(line))


def _explained(*views: RankView, world_size: int = 4, **more: float) -> Diagnosis:
    found = explain(views, world_size=world_size, job="j", created="2026-01-01T00:00:00+00:00", **more)  # type: ignore[arg-type]
    assert found is not None
    # Whatever is found goes through the contract and all forms.
    assert to_json(from_json(to_json(found))) == to_json(found)
    assert render_text(found) and render_markdown(found) and render_prompt(found)
    return found


def _said(found: Diagnosis) -> tuple[str, str, str, str]:
    return found.kind, found.verdict.cause, found.verdict.ranks, found.verdict.confidence


def test_the_rank_that_never_came_is_named_with_its_line_and_the_others_are_consequences() -> None:
    late = _rank(1, _call(40, "done"), thread=_in(12))
    found = _explained(_waiting(0), late, _waiting(2), _waiting(3))
    assert _said(found) == ("hang", "missing_rank", "1", "established")
    assert "allreduce 41 of default_pg" in found.verdict.summary and "data.py:12" in found.verdict.summary
    (waiting,) = found.consequences
    assert (waiting.ranks, waiting.function) == ("0,2-3", "allreduce 41 of default_pg")
    assert any(e.text.startswith("0,2-3: all_reduce") for e in found.evidence.values())


def test_without_a_stack_a_missing_rank_is_supported_and_without_data_it_is_unknown() -> None:
    late = _rank(1, _call(40, "done"))
    assert _said(_explained(_waiting(0), late, _waiting(2), _waiting(3)))[3] == "supported"
    for blind in ([], [RankView(rank=1, host="b", is_recording=False, no_stack="no stacks: x")]):
        found = _explained(_waiting(0), *blind, _waiting(2), _waiting(3))
        assert _said(found) == ("hang", "unknown", "1", "unknown")
        assert "left no data" in found.verdict.summary


def test_a_rank_that_is_late_but_moves_and_a_job_that_shuts_down_are_nothing() -> None:
    late = replace(_rank(1, _call(40, "done"), thread=_in(12)), silent_s=0.2)
    assert explain([_waiting(0), late, _waiting(2), _waiting(3)], world_size=4) is None
    leaving = _thread(Frame("destroy_process_group", f"{TORCH}/distributed/distributed_c10d.py", 2))
    over = [_rank(r, _call(40, "done"), thread=leaving) for r in range(3)]
    assert explain([*over, replace(_rank(3, _call(40, "done")), state="ended", silent_s=None)], world_size=4) is None
    assert explain([], world_size=4) is None
    assert explain([replace(v, silent_s=1.0) for v in (_waiting(0), _waiting(1))], world_size=2) is None
    # One that leaves by os._exit looks dead; the others have come to their end.
    gone = replace(_rank(3), state="died", silent_s=None)
    assert explain([*(replace(v, state="ended", silent_s=None) for v in over), gone], world_size=4) is None


def test_another_operation_is_blamed_by_majority_and_a_tie_on_nobody() -> None:
    other = _rank(2, _call(41, op="broadcast"), thread=_reducing(44))
    found = _explained(_waiting(0), _waiting(1), other, _waiting(3))
    assert _said(found) == ("hang", "collective_mismatch", "2", "established")
    tie = [_waiting(0), _waiting(1), other, replace(other, rank=3)]
    assert _said(_explained(*tie)) == ("hang", "collective_mismatch", "0-3", "hypothesis")
    sizes = [_waiting(0), _waiting(1), _rank(2, _call(41, num_bytes=800), thread=_reducing()), _waiting(3)]
    assert "800 bytes" in _explained(*sizes).verdict.summary
    # Uneven shares are what these operations are for.
    uneven = [_rank(r, _call(41, op="alltoall_base", num_bytes=8 * r), thread=_reducing()) for r in range(4)]
    assert _said(_explained(*uneven))[1] == "unknown"


def test_a_rank_that_left_a_call_out_is_told_by_the_step_in_which_it_makes_the_next_ones() -> None:
    def history(rank: int, shift: int) -> RankView:
        calls = [_call(n, "done", step=n - 1 + (shift if n > 20 else 0)) for n in range(1, 41)]
        last = _call(41, op="barrier" if shift else "allreduce", step=40 + shift)
        return _rank(rank, *calls, last, thread=_reducing())

    found = _explained(history(0, 0), history(1, 1), history(2, 0), history(3, 0))
    assert _said(found)[1:3] == ("collective_mismatch", "1")
    assert "has left a call out in step 20" in found.verdict.summary


def test_calls_of_steps_that_are_not_recorded_tell_no_rank_apart() -> None:
    bare = _rank(1, _call(41, "unseen", dtype="", step=-1), thread=_reducing())
    assert _said(_explained(_waiting(0), bare, _waiting(2), _waiting(3)))[1] == "unknown"


def test_groups_in_opposite_order_are_a_deadlock_that_names_both_lines() -> None:
    first, second = Group("b" * 16, "dp", (0, 1, 2, 3)), Group("c" * 16, "tp", (0, 1, 2, 3))
    odd = _rank(0, _call(1, group=second), thread=_reducing(50), groups=(first, second))
    rest = [_rank(r, _call(1, group=first), thread=_reducing(60), groups=(first, second)) for r in (1, 2, 3)]
    found = _explained(odd, *rest)
    assert _said(found) == ("hang", "deadlock", "0", "established")
    assert "train.py:50" in found.verdict.summary and "train.py:60" in found.verdict.summary
    pair = _explained(odd, rest[0], world_size=2)
    assert _said(pair)[2] == "0-1" and pair.verdict.scope == "group"


def test_two_ranks_that_receive_from_each_other_are_a_deadlock() -> None:
    views = []
    for rank in range(2):
        receiving = _thread(Frame("recv", f"{TORCH}/distributed/distributed_c10d.py", 9), Frame("f", "/u/t.py", 3))
        call = _call(1, "unseen", op="recv", peer=1 - rank, group=replace(WORLD, members=(0, 1)))
        views.append(_rank(rank, call, thread=receiving, groups=(replace(WORLD, members=(0, 1)),)))
    assert _said(_explained(*views, world_size=2)) == ("hang", "deadlock", "0-1", "established")


def test_the_walk_goes_on_to_whoever_is_behind_the_rank_that_is_missing() -> None:
    # 0 waits for 1 in the world, 1 waits for 2 in a pair, 2 sits in its own code.
    pair = Group("b" * 16, "pair", (1, 2))
    third = Group("d" * 16, "rest", (2, 3))
    views = [
        _waiting(0),
        _rank(1, _call(40, "done"), _call(7, group=pair), thread=_reducing(70), groups=(WORLD, pair)),
        _rank(2, _call(40, "done"), _call(6, "done", group=pair), thread=_in(12), groups=(WORLD, pair, third)),
        _waiting(3),
    ]
    found = _explained(*views)
    assert _said(found) == ("hang", "missing_rank", "2", "established")
    assert {item.ranks for item in found.consequences} == {"0,3", "1"}


def test_when_all_have_entered_and_nobody_is_through_no_rank_is_missing() -> None:
    found = _explained(*(_waiting(r) for r in range(4)))
    assert _said(found) == ("hang", "unknown", "0-3", "unknown")
    assert "a missing rank" in found.findings[0].ruled_out[0]
    apart = [replace(_waiting(r), host="ab"[r % 2]) for r in range(4)]
    assert _said(_explained(*apart)) == ("hang", "nic_or_host_network", "0-3", "hypothesis")


def test_a_call_that_the_others_have_behind_them_is_not_one_that_nobody_gets_through() -> None:
    done = [_rank(r, _call(41, "done"), thread=_in(12)) for r in (0, 2, 3)]
    found = _explained(_waiting(1), *done)
    assert _said(found) == ("hang", "unknown", "1", "unknown")
    assert "which ranks 0,2-3 have behind them" in found.verdict.summary


def test_whoever_was_ended_after_the_others_had_given_up_waiting_is_the_one_that_did_not_come() -> None:
    lost = "RuntimeError: Timed out waiting 1800000ms for recv operation to complete"
    failed = _call(41, "failed", for_s=1.0)
    gave_up = [replace(_rank(r, _call(40, "done"), failed), exception=lost, state="died") for r in (1, 2, 3)]
    late = replace(_rank(0, _call(40, "done")), state="died", exit_status=-15)
    found = _explained(late, *gave_up)
    assert _said(found) == ("crash", "missing_rank", "0", "supported")
    assert "had not come to allreduce 41 of default_pg when the others gave up" in found.verdict.summary
    saves = replace(late, phase="save", phase_s=1800.0)
    assert _said(_explained(saves, *gave_up)) == ("crash", "checkpoint_io", "0", "established")
    # Nobody saw how it ended, nor how one of those that waited did: it was there for as long as they had patience.
    unseen, ended = replace(late, exit_status=None), replace(_waiting(2), state="died")
    assert _said(_explained(unseen, gave_up[0], ended, gave_up[2])) == ("crash", "missing_rank", "0", "supported")
    # NCCL waits for a rank that has gone, too.
    watched = [replace(view, exception="RuntimeError: Watchdog caught a Timeout") for view in gave_up]
    assert _said(_explained(unseen, *watched))[:3] == ("crash", "dead_worker", "0")
    # Connections that break at once are of a death, whoever sent the signal.
    broke = [replace(view, exception="RuntimeError: Connection closed by peer") for view in gave_up]
    assert _said(_explained(late, *broke))[:3] == ("crash", "dead_worker", "0")


def test_an_exception_or_a_death_comes_first_and_its_followers_are_not_blamed() -> None:
    lost = "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:1"
    follower = replace(_rank(0, _call(41, "failed")), state="ended", exception=lost, silent_s=None)
    raised = replace(_rank(1, _call(40, "done")), state="ended", exception="ValueError: x", exception_at="t.py:7")
    found = _explained(follower, raised, replace(follower, rank=2), _waiting(3))
    assert _said(found) == ("crash", "exception", "1", "established") and "t.py:7" in found.verdict.summary
    died = replace(_rank(1, _call(40, "done")), state="died", exit_status=-9, silent_s=None)
    found = _explained(follower, died, replace(follower, rank=2), _waiting(3))
    assert _said(found) == ("crash", "dead_worker", "1", "established") and "SIGKILL" in found.verdict.summary
    # The launcher's SIGTERM to the rest says nothing of them.
    rest = [replace(_waiting(r), state="died", exit_status=-15, silent_s=None) for r in (0, 2, 3)]
    assert _said(_explained(died, *rest))[2] == "1"
    everybody = [replace(v, exit_status=None, state="died", silent_s=None) for v in (*rest, died)]
    assert _said(_explained(*everybody)) == ("crash", "unknown", "0-3", "unknown")
    pair = replace(follower, groups=(replace(WORLD, members=(0, 1)),))
    assert _said(_explained(pair, replace(pair, rank=1), world_size=2))[:3] == ("crash", "unknown", "0-1")


def test_who_reached_its_end_early_is_named_and_not_those_who_could_not_go_on_without_it() -> None:
    lost = "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:1"
    victims = [replace(_rank(r, _call(41, "done")), state="died", exception=lost, silent_s=None) for r in (0, 2)]
    over = replace(_rank(1, _call(41, "done")), state="ended", exit_status=3, silent_s=None)
    found = _explained(*victims, over, world_size=3)
    assert _said(found) == ("crash", "missing_rank", "1", "supported") and "exit status 3" in found.verdict.summary
    ended = [replace(_waiting(r), state="died", exit_status=-15, silent_s=None) for r in (0, 2)]
    assert _said(_explained(*ended, over, world_size=3)) == ("crash", "missing_rank", "1", "supported")
    everybody = [replace(over, rank=rank) for rank in range(3)]
    assert explain(everybody, world_size=3, job="j", created="2026-01-01T00:00:00+00:00") is None


def test_a_job_whose_ranks_were_all_ended_by_a_signal_to_end_is_no_crash() -> None:
    ended = [replace(_waiting(r), state="died", exit_status=-15, silent_s=None) for r in range(4)]
    assert explain(ended, world_size=4, job="j", created="2026-01-01T00:00:00+00:00") is None


def test_a_time_out_leads_to_the_rank_that_was_waited_for() -> None:
    late = "RuntimeError: Timed out waiting 1800000ms for recv operation to complete"
    gone = [replace(_rank(r, _call(41, "failed")), state="ended", exception=late, silent_s=None) for r in (0, 2, 3)]
    found = _explained(*gone, _rank(1, _call(40, "done"), thread=_in(12)))
    assert _said(found) == ("crash", "missing_rank", "1", "established")


def test_who_left_by_an_error_of_its_network_and_is_waited_for_is_a_hypothesis() -> None:
    lost = "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:1"
    first = replace(_rank(1, _call(40, "failed")), state="ended", exception=lost, silent_s=None)
    found = _explained(_waiting(0), first, _waiting(2), _waiting(3))
    assert _said(found) == ("crash", "nic_or_host_network", "1", "hypothesis")


def test_saving_evaluation_and_compiling_are_pauses_until_their_limit() -> None:
    saving = _thread(
        Frame("write", "/home/u/store.py", 5, "self.file.write(data)"),
        Frame("_save", f"{TORCH}/serialization.py", 1300),
        Frame("save", f"{TORCH}/serialization.py", 1000),
        Frame("checkpoint", "/home/u/train.py", 80),
    )
    views = [_waiting(r) for r in (1, 2, 3)]
    found = _explained(_rank(0, _call(40, "done"), thread=saving), *views)
    assert _said(found) == ("paused", "checkpoint_io", "0", "supported")
    found = _explained(_rank(0, _call(40, "done"), thread=saving), *views, phase_limit_s=30.0)
    assert _said(found)[:2] == ("hang", "checkpoint_io")
    evaluating = _thread(Frame("forward", "/home/u/model.py", 5), Frame("evaluate", "/home/u/train.py", 90))
    assert _said(_explained(_rank(0, _call(40, "done"), thread=evaluating), *views))[:2] == ("paused", "none")
    recorded = replace(_rank(0, _call(40, "done"), thread=_in(3)), phase="compile", phase_s=50.0)
    assert _said(_explained(recorded, *views)) == ("paused", "recompilation", "0", "established")


def test_a_rank_that_waits_for_a_dead_worker_is_told_from_one_whose_workers_live() -> None:
    fetching = _thread(
        Frame("wait", "/usr/lib/python3.11/multiprocessing/connection.py", 931),
        Frame("_try_get_data", f"{TORCH}/utils/data/dataloader.py", 1132),
        Frame("epoch", "/home/u/train.py", 33),
    )
    late = replace(_rank(1, _call(40, "done"), thread=fetching), open=(Open("dataloader next 6", "next", 60.0),))
    views = [_waiting(r) for r in (0, 2, 3)]
    dead = replace(late, children=(Child(7, "pt_data_worker", "dead", -9), Child(8, "x", "dead", 0)))
    found = _explained(dead, *views)
    assert (
        _said(found) == ("hang", "dead_worker", "1", "established") and "7 (killed by SIGKILL)" in found.verdict.summary
    )
    alive = replace(late, children=(Child(7, "pt_data_worker", "alive"),))
    assert _said(_explained(alive, *views)) == ("hang", "input_pipeline", "1", "supported")


def test_threads_that_keep_locks_from_each_other_are_a_deadlock_of_one_rank() -> None:
    here, there = Frame("load", "/home/u/data.py", 10, "with a:"), Frame("save", "/home/u/data.py", 20, "with b:")
    main = _thread(here, waits_for="a", holds=(Held("b", here),))
    other = Thread("saver", (there,), waits_for="b", holds=(Held("a", there),))
    late = replace(_rank(1, _call(40, "done")), threads=(main, other))
    found = _explained(late, *(_waiting(r) for r in (0, 2, 3)))
    assert _said(found) == ("hang", "deadlock", "1", "supported")
    assert "data.py:10" in found.verdict.summary and "data.py:20" in found.verdict.summary
    busy = replace(late, threads=(main, replace(other, waits_for="")))
    found = _explained(busy, *(_waiting(r) for r in (0, 2, 3)))
    assert _said(found)[1] == "missing_rank" and "which thread saver holds" in found.verdict.summary


def test_a_lock_whose_holder_waits_for_other_ranks_leads_to_those_that_do_not_come() -> None:
    here = Frame("load", "/home/u/data.py", 10, "with a:")
    other = replace(_reducing(60), name="reducer", is_main=False, holds=(Held("a", here),))
    tangled = replace(_waiting(0), threads=(_thread(here, waits_for="a"), other))
    found = _explained(tangled, _rank(1, _call(40, "done"), thread=_in(12)), _waiting(2), _waiting(3))
    assert _said(found) == ("hang", "missing_rank", "1", "established")
    assert {item.ranks for item in found.consequences} == {"0", "2-3"}


def test_a_stopped_or_traced_process_is_said_so_and_never_blamed_on_its_line() -> None:
    stopped = replace(_rank(1, _call(40, "done"), thread=_in(12)), state="stopped")
    found = _explained(stopped, *(_waiting(r) for r in (0, 2, 3)))
    assert _said(found) == ("hang", "missing_rank", "1", "established")
    assert "stopped by a signal" in found.verdict.summary and found.findings[0].function is None
    found = _explained(replace(stopped, state="traced", tracer=77), *(_waiting(r) for r in (0, 2, 3)))
    assert _said(found)[1] == "profiler_overhead" and "process 77" in found.verdict.summary


def _opening(rank: int) -> RankView:
    """In the rendezvous, before any step."""
    meeting = Frame("init_process_group", f"{TORCH}/distributed/distributed_c10d.py", 1800)
    user = Frame("main", "/home/u/train.py", 9, "dist.init_process_group()")
    return replace(_rank(rank, thread=_thread(meeting, user)), num_steps=0, phase="rendezvous")


def _asking(rank: int, source: str = "run = tracker.init()", **more: object) -> RankView:
    """A rank without a ring that reads an answer."""
    library = () if ".recv" in source else (Frame("readinto", "/usr/lib/python3.11/socket.py", 706),)
    thread = _thread(*library, Frame("start_run", "/home/u/track.py", 5, source))
    view = RankView(rank=rank, host="a", pid=9, state="running", is_recording=False, is_still=True, threads=(thread,))
    return replace(view, **more)  # type: ignore[arg-type]


def test_a_rank_that_asks_a_server_outside_before_the_others_have_it_is_named_with_its_line() -> None:
    others = [_opening(rank) for rank in (1, 2, 3)]
    for asking in (_asking(0), _asking(0, "data = connection.recv(4)")):
        found = _explained(asking, *others)
        assert _said(found) == ("hang", "startup_network", "0", "established")
        function = found.findings[0].function
        assert function is not None and function.user_location == "/home/u/track.py:5"
        assert "the rendezvous" in found.verdict.summary


def test_a_server_that_answers_slowly_and_one_that_is_asked_in_training_are_no_network_at_start_up() -> None:
    others = [_opening(rank) for rank in (1, 2, 3)]
    assert _said(_explained(_asking(0, is_still=False), *others))[1] == "missing_rank"
    late = replace(_asking(0, num_steps=5), calls=(_call(40, "done"),), is_recording=True, groups=(WORLD,))
    assert _said(_explained(late, *(_waiting(r) for r in (1, 2, 3))))[1] == "missing_rank"


def test_silence_in_which_nobody_waits_for_a_rank_blames_nobody() -> None:
    found = _explained(*(_rank(r, _call(40, "done"), thread=_in(12)) for r in range(4)))
    assert _said(found) == ("hang", "unknown", "0-3", "unknown")
    alone = [_rank(0, thread=_in(12)), replace(_rank(1, thread=_in(13)), silent_s=0.1)]
    assert explain(alone, world_size=2) is None


@given(
    st.permutations(range(6)), st.sets(st.integers(0, 5), max_size=5), st.sampled_from(["own", "op", "data", "order"])
)
def test_renaming_ranks_renames_findings_and_changes_nothing_else(names: list[int], odd: set[int], fault: str) -> None:
    first, second = Group("b" * 16, "dp", tuple(range(6))), Group("c" * 16, "tp", tuple(range(6)))

    def views(rename: dict[int, int]) -> list[RankView]:
        made = []
        for rank in range(6):
            groups = (replace(first, members=tuple(sorted(rename.values()))), second)
            view = _rank(rename[rank], _call(9, group=first), thread=_reducing(), groups=groups)
            if rank in odd and fault == "own":
                view = replace(view, calls=(_call(8, "done", group=first),), threads=(_in(12),))
            elif rank in odd and fault == "op":
                view = replace(view, calls=(_call(9, op="barrier", group=first),))
            elif rank in odd and fault == "order":
                view = replace(view, calls=(_call(8, "done", group=first), _call(1, group=second)))
            elif rank in odd:
                continue
            made.append(view)
        return made

    plain = explain(views({r: r for r in range(6)}), world_size=6)
    renamed = explain(views(dict(enumerate(names))), world_size=6)
    assert (plain is None) == (renamed is None)
    if plain is None or renamed is None:
        assert len(odd) == 6
        return
    assert [f.cause for f in plain.findings] == [f.cause for f in renamed.findings]
    assert [f.confidence for f in plain.findings] == [f.confidence for f in renamed.findings]
    for one, other in zip(plain.findings, renamed.findings, strict=True):
        assert format_ranks(names[rank] for rank in parse_ranks(one.ranks)) == other.ranks


@given(st.integers(2, 9), st.sets(st.integers(0, 8)))
def test_blame_for_another_call_needs_a_majority(size: int, odd: set[int]) -> None:
    group = Group("b" * 16, "dp", tuple(range(size)))
    odd = {rank for rank in odd if rank < size}
    views = [
        _rank(r, _call(9, op="barrier" if r in odd else "allreduce", group=group), thread=_reducing(), groups=(group,))
        for r in range(size)
    ]
    found = explain(views, world_size=size)
    assert found is not None
    if not odd or len(odd) == size:
        assert found.verdict.cause == "unknown"
        return
    minority = min(odd, set(range(size)) - odd, key=len)
    if len(minority) * 2 < size:
        assert (found.verdict.scope, found.verdict.ranks) == ("rank", format_ranks(minority))
    else:
        assert (found.verdict.scope, found.verdict.confidence) == ("group", "hypothesis")


@given(st.data())
def test_whatever_the_views_hold_the_answer_is_a_sound_diagnosis_or_none(data: st.DataObject) -> None:
    groups = (WORLD, Group("b" * 16, "x", (0, 1)), Group("c" * 16, "y", ()))
    states = st.sampled_from(["running", "stopped", "traced", "ended", "died", "unknown"])
    calls = st.builds(
        Call, st.sampled_from([g.key for g in groups] + ["f" * 16]), st.integers(1, 3),
        st.sampled_from(["allreduce", "barrier", "send", "recv"]), st.sampled_from(["in", "done", "failed", "unseen"]),
        peer=st.integers(-1, 5), for_s=st.floats(0, 99),
    )  # fmt: skip
    threads = st.sampled_from([(), (_reducing(),), (_in(3),), (_thread(),)])
    views = [
        RankView(
            rank=rank,
            state=data.draw(states),
            groups=groups,
            calls=tuple(data.draw(st.lists(calls, max_size=4))),
            threads=data.draw(threads),
            silent_s=data.draw(st.sampled_from([None, 1.0, 60.0])),
            exception=data.draw(st.sampled_from(["", "", "ValueError: x", "RuntimeError: Connection closed by peer"])),
            is_recording=data.draw(st.booleans()),
            knows_all_groups=data.draw(st.booleans()),
        )
        for rank in data.draw(st.sets(st.integers(0, 3)))
    ]
    found = explain(views, world_size=4)
    if found is not None:
        assert found.findings and found.verdict.summary
        assert all(parse_ranks(finding.ranks) for finding in found.findings)
        assert to_json(from_json(to_json(found))) == to_json(found)


def test_stacks_of_many_ranks_fold_to_a_line_per_place() -> None:
    stacks = {rank: _reducing() for rank in range(1000) if rank != 17} | {17: _in(12)}
    assert lines(merge(stacks)) == [
        "17: decode (data.py:12)",
        "0-16,18-999: all_reduce (distributed_c10d.py:3252) <- step (train.py:40)",
    ]
    assert lines(merge({0: _thread(), 1: _in(1), 2: _in(2)}), 1)[-1] == "... and 1 more places"


def test_a_thread_without_frames_that_an_agent_says_holds_a_lock_ends_nothing() -> None:
    taken = Held("self.lock", Frame("step", "/home/u/train.py", 7))
    waits = replace(_in(12), waits_for="self.lock")
    late = replace(_rank(1, _call(40, "done"), thread=waits), threads=(waits, Thread("t", (), holds=(taken,))))
    assert _explained(_waiting(0), late, _waiting(2), _waiting(3)).verdict.ranks == "1"

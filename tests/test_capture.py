"""Captures in real processes: what is in the file, who is told what, and that training comes first."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from eroica import ring as flight
from eroica.commands import Frames, State, parse_answer
from eroica.critical_path import iterations_of
from eroica.offline import diagnose_paths
from eroica.pattern import summarize
from eroica.probe.frames import MOST_DEPTH, SOON_S, Sampler, _stacks, _tids, _Turns, _undisturbed
from eroica.ring import Flight, read_flight
from eroica.trace import read_trace
from tests.test_probe import ROOT, _environ

JOB = ROOT / "tests" / "capture_job.py"
CASES = ROOT / "tests" / "capture_cases.py"
SECONDS = 600


def _train(folder: Path, *arguments: str, num_ranks: int = 1, **more: str) -> list[tuple[int, str, str]]:
    """Exit status, stdout and stderr of each rank."""
    more = {"EROICA_RING_DIR": str(folder / "rings"), "WORLD_SIZE": str(num_ranks), "OMP_NUM_THREADS": "1", **more}
    meeting = ["--rendezvous", str(folder / "rendezvous")] if num_ranks > 1 else []
    ranks = [
        subprocess.Popen(
            [sys.executable, str(JOB), *meeting, *arguments],
            env=_environ(RANK=str(rank), **more),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    said = [rank.communicate(timeout=SECONDS) for rank in ranks]
    return [(rank.returncode, *texts) for rank, texts in zip(ranks, said, strict=True)]


def _flight(folder: Path) -> Flight:
    (path,) = (folder / "rings").glob("*.ring")
    return read_flight(path)


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """What the process of all cases printed."""
    folder = tmp_path_factory.mktemp("captures")
    environ = _environ(RANK="0", WORLD_SIZE="1", EROICA_RING_DIR=str(folder / "rings"))
    done = subprocess.run([sys.executable, str(CASES)], env=environ, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    result: dict[str, object] = json.loads(done.stdout)
    return result


def _capture(said: dict[str, object], case: str) -> Path:
    told = said[case]
    assert isinstance(told, list) and told[0] == State.DONE.name, told
    return Path(told[1])


@pytest.mark.slow
@pytest.mark.parametrize("frames", list(Frames))
def test_a_window_holds_the_steps_that_were_agreed_on(said: dict[str, object], frames: Frames) -> None:
    trace = read_trace(_capture(said, f"window {frames.name}"))
    assert (trace.rank, trace.world_size, trace.damage.any) == (0, 1, False)
    iterations = iterations_of(trace)
    assert iterations.by == "ProfilerStep" and iterations.count == 3
    first = int(iterations.steps[0])
    assert iterations.steps.tolist() == [first, first + 1, first + 2]
    # The marks, by our clock, and the operators, by torch's, agree: each update begins in its iteration. (It ends
    # after our hook has taken the time, and on a busy host much later.)
    updates = [
        start
        for start, name in zip(trace.ts_ns.tolist(), trace.name.tolist(), strict=True)
        if trace.strings[name].startswith("Optimizer.step#")
    ]
    assert len(updates) == 3
    for start, low, high in zip(updates, iterations.bounds_ns[:-1], iterations.bounds_ns[1:], strict=True):
        assert low < start < high
    assert summarize(trace).num_iterations == 3


@pytest.mark.slow
def test_nothing_is_left_behind_after_windows_one_after_the_other(said: dict[str, object]) -> None:
    assert said["left"] is True
    assert said["mode"] == ["0o600", "0o700", "0o700"]
    assert said["files"] == ["rank0.json"]


@pytest.mark.slow
def test_a_window_is_left_out_if_its_start_has_passed_or_nobody_commits(said: dict[str, object]) -> None:
    assert said["late"] == "LATE"
    assert (said["prepared"], said["no commit"]) == ("PREPARED", "LATE")
    assert said["running"] == "RUNNING" and said["abort"] == ["ABORTED", False, False]


@pytest.mark.slow
def test_the_profilers_of_the_user_come_first(said: dict[str, object]) -> None:
    assert (said["theirs first"], said["theirs first, steps"]) == ("BUSY", 5)
    assert said["theirs warms up"] == "BUSY"
    assert said["ours first"] == "RUNNING"
    assert (said["they come"], said["they come, steps"]) == (["BUSY", False, False], 2)
    assert said["itt comes"] == "BUSY"
    assert (said["cProfile and tracing"], said["cProfile and sampling"]) == ("BUSY", "DONE")


@pytest.mark.slow
def test_an_exception_in_the_loop_discards_the_window_and_stays_the_users(said: dict[str, object]) -> None:
    assert said["their exception"] == "no sample 6"
    assert said["exception"] == ["DISCARDED", False]


@pytest.mark.slow
def test_loaders_may_fork_workers_inside_of_a_window(said: dict[str, object]) -> None:
    assert said["loader's workers"] == "DONE"


@pytest.mark.slow
def test_a_window_without_steps_counts_nexts_and_one_of_two_optimizers_gives_whole_iterations(
    said: dict[str, object],
) -> None:
    nexts = iterations_of(read_trace(_capture(said, "nexts")))
    assert (nexts.by, nexts.count) == ("ProfilerStep", 3)
    assert [int(b - a) for a, b in zip(nexts.steps[:-1], nexts.steps[1:], strict=True)] == [1, 1]
    both = iterations_of(read_trace(_capture(said, "two optimizers")))
    assert [int(b - a) for a, b in zip(both.steps[:-1], both.steps[1:], strict=True)] == [2] * (both.count - 1)
    assert both.count in (3, 4)


@pytest.mark.slow
def test_a_window_ends_by_time_with_what_is_complete_also_where_no_boundary_comes(said: dict[str, object]) -> None:
    cut = said["time is over"]
    assert isinstance(cut, list) and cut[0] == "DONE" and cut[2:] == [True, False]
    nothing = said["time is over at once"]
    assert isinstance(nothing, list) and nothing[0] == "DISCARDED" and nothing[2:] == [False, False]


@pytest.mark.slow
def test_a_full_disk_or_a_folder_that_has_gone_fails_the_window_and_nothing_else(said: dict[str, object]) -> None:
    assert said["disk full"] == ["FAILED", []]
    assert said["folder gone"] == "FAILED"
    assert said["still recording"] is True


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "status"),
    [
        pytest.param("return", 0, marks=pytest.mark.full),
        pytest.param("raise", 1, marks=pytest.mark.full),
        pytest.param("exit", 3, marks=pytest.mark.full),
        ("kill", -9),
    ],
)
def test_a_process_that_ends_inside_of_a_window_ends_as_it_would(tmp_path: Path, end: str, status: int) -> None:
    ((code, _, stderr),) = _train(tmp_path, "--window=100", "--steps=12", f"--end={end}")
    assert code == status, stderr
    assert ("ValueError: the end" in stderr) == (end == "raise")
    seen = _flight(tmp_path)
    (record,) = [record for record in seen.records if record.kind == flight.CAPTURE]
    assert (record.sequence, record.step) == (1, 8)
    if end == "kill":
        assert record.duration_ns is None
    else:
        assert record.raised and parse_answer(seen.words[flight.ANSWER]) == (1, State.DISCARDED)
        assert seen.words[flight.STATE] == flight.ENDED
    assert not list((tmp_path / "rings").rglob("*.json"))


@pytest.mark.e2e
@pytest.mark.full
@pytest.mark.parametrize("frames", [Frames.SAMPLED, Frames.TRACED])
@pytest.mark.parametrize(
    ("fault", "cause", "function"),
    [("slow_input", "input_pipeline", "__getitem__"), ("backward_delay", "host_python", "log_gradient")],
)
def test_a_window_of_four_ranks_names_the_fault_and_training_stays_the_same(
    tmp_path: Path, frames: Frames, fault: str, cause: str, function: str
) -> None:
    bare = _train(tmp_path, f"--fault={fault}", "--steps=20", num_ranks=4, EROICA="0")
    (tmp_path / "rendezvous").unlink(missing_ok=True)
    asked = [f"--fault={fault}", "--culprit=2", "--steps=20", "--window=10", f"--frames={frames}"]
    done = _train(tmp_path, *asked, num_ranks=4)
    assert [code for code, *_ in bare + done] == [0] * 8, done
    assert [out for _, out, _ in done] == [out for _, out, _ in bare]
    found, _ = diagnose_paths([str(tmp_path / "rings" / "captures" / "1")])
    assert found.kind == "slow"
    first = found.findings[0]
    assert (first.ranks, first.cause) == ("2", cause)
    lines = JOB.read_text().splitlines()
    line = next(k for k, text in enumerate(lines, 1) if f"def {function}" in text)
    assert first.function is not None and first.function.user_location == f"capture_job.py:{line}"
    assert [finding.ranks for finding in found.findings] == ["2"]


LOOKED_AT_BY_A_CHILD = """
import os, threading
from eroica.probe.frames import Sampler
child = os.fork()
if child:
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
sampler = Sampler(threading.get_ident(), True, 5.0, lambda: None)
looking = threading.Thread(target=sampler._look)
looking.start()
looking.join()
os._exit([thread.tid for thread in sampler.seen()] != [os.getpid()])
"""


@pytest.mark.slow
def test_events_are_not_read_in_python_on_a_torch_that_does_so_when_a_window_ends(tmp_path: Path) -> None:
    code = """
import torch
from torch.autograd.profiler import profile
leave, read, num_read = profile.__exit__, profile._parse_kineto_results, []

def leave_and_read(self, *error):       # as up to torch 2.5
    leave(self, *error)
    self.function_events

def count(self, *args, **more):
    num_read.append(1)
    return read(self, *args, **more)

profile.__exit__, profile._parse_kineto_results = leave_and_read, count
from eroica.commands import Command, Verb
from eroica.probe.recorder import RECORDER
from eroica.ring import post
optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
for step in range(8):
    optimizer.step()
    if step < 2:
        verb = (Verb.PREPARE, Verb.COMMIT)[step]
        post(RECORDER.ring.path, Command(window=1, verb=verb, start=4, num_steps=2).word())
RECORDER.capture.finish(RECORDER.ring)
print(len(num_read), len(list(RECORDER.ring.path.parent.glob("captures/1/rank0.json"))))
"""
    environ = _environ(RANK="0", WORLD_SIZE="1", EROICA_RING_DIR=str(tmp_path / "rings"))
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=SECONDS)
    assert done.stdout == "0 1\n", done.stderr


@pytest.mark.slow
def test_windows_leave_nothing_for_a_garbage_collector_that_is_switched_off(tmp_path: Path) -> None:
    code = """
import gc, threading
import torch
from eroica.commands import Command, Verb
from eroica.probe.frames import Sampler
from eroica.probe.recorder import RECORDER
from eroica.ring import post
gc.disable()
optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
said = {0: (1, Verb.PREPARE, 3), 1: (1, Verb.COMMIT, 3)}
said |= {5: (2, Verb.PREPARE, 8), 6: (2, Verb.COMMIT, 8), 8: (2, Verb.ABORT, 8)}
for step in range(12):
    optimizer.step()
    if step in said:
        window, verb, start = said[step]
        if verb == Verb.PREPARE:
            RECORDER.capture.finish(RECORDER.ring)
        post(RECORDER.ring.path, Command(window=window, verb=verb, start=start, num_steps=2).word())
    if step == 8:
        num_running = sum(type(each) is Sampler for each in gc.get_objects())
for thread in threading.enumerate():
    if thread.name.startswith("eroica"):
        thread.join()
print(num_running, sum(type(each) is Sampler for each in gc.get_objects()))
"""
    environ = _environ(RANK="0", WORLD_SIZE="1", EROICA_RING_DIR=str(tmp_path / "rings"))
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=SECONDS)
    assert done.stdout == "1 0\n", done.stderr


def test_a_window_that_is_proposed_while_another_one_lasts_is_answered_when_that_one_is_over(tmp_path: Path) -> None:
    code = """
import torch
from eroica import ring as flight
from eroica.commands import Command, Verb, parse_answer
from eroica.probe.recorder import RECORDER
from eroica.ring import post, read_flight
optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
said = {0: (1, Verb.PREPARE, 3, 4), 1: (1, Verb.COMMIT, 3, 4), 4: (2, Verb.PREPARE, 20, 2)}
answers = []
for step in range(30):
    optimizer.step()
    if step in said:
        window, verb, start, num = said[step]
        post(RECORDER.ring.path, Command(window=window, verb=verb, start=start, num_steps=num).word())
    if step == 9:
        RECORDER.capture.finish(RECORDER.ring)  # it is written
    if step == 15:
        post(RECORDER.ring.path, Command(window=2, verb=Verb.COMMIT, start=20, num_steps=2).word())
    told = parse_answer(read_flight(RECORDER.ring.path).words[flight.ANSWER])
    if told and told not in answers:
        answers.append(told)
RECORDER.capture.finish(RECORDER.ring)
print(*(f"{window}-{state.name}" for window, state in answers))
print(*sorted(str(path.relative_to(path.parents[1])) for path in RECORDER.ring.path.parent.glob("captures/*/*")))
"""
    environ = _environ(RANK="0", WORLD_SIZE="1", EROICA_RING_DIR=str(tmp_path / "rings"))
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=SECONDS)
    answers, files = done.stdout.splitlines()
    told = answers.split()
    assert told.index("2-BUSY") < told.index("2-PREPARED") < told.index("2-COMMITTED"), done
    assert files == "1/rank0.json 2/rank0.json"


def test_stacks_of_a_rank_that_was_forked_are_those_of_its_own_thread() -> None:
    ended = subprocess.run([sys.executable, "-c", LOOKED_AT_BY_A_CHILD], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def _spin(rounds: int) -> int:
    """In Python alone, which gives way to nobody."""
    number = 1
    for _ in range(rounds):
        number = number * 31 % 1_000_003
    return number


def _give_way() -> None:
    """As native code does, for a moment."""
    time.sleep(0.0005)


def _turn_by_turn(until: Callable[[], bool]) -> None:
    while not until():
        _spin(80_000)
        _give_way()


def _looked_at(other: Callable[[threading.Event], None] | None = None) -> tuple[Counter[str], set[float]]:
    """What was on top of this thread's stack in a second of work that gives way often, by name, and the intervals after
    which it had to. `other`: runs beside, on a thread of its own."""
    intervals, stopped = set[float](), threading.Event()
    beside = threading.Thread(target=other, args=(stopped,)) if other is not None else None
    if beside is not None:
        beside.start()
    sampler = Sampler(threading.get_ident(), True, 5.0, lambda: None)
    sampler.start()
    end = time.monotonic() + 1

    def is_over() -> bool:
        intervals.add(round(sys.getswitchinterval(), 6))
        return time.monotonic() > end

    _turn_by_turn(is_over)
    sampler.stop()
    stopped.set()
    sampler.thread.join()
    if beside is not None:
        beside.join()
    (own,) = [thread for thread in sampler.seen() if thread.outer]
    return Counter(stack[-1].co_name for _, stack in own.samples if stack), intervals


def test_functions_that_compute_in_python_for_less_than_a_turn_are_seen_and_turns_are_as_before_in_the_end() -> None:
    usual_s = sys.getswitchinterval()
    seen, intervals = _looked_at()
    assert seen["_spin"] > 0.2 * seen.total(), seen  # it has nine tenths of the time, and was not seen at all
    assert intervals == {usual_s, SOON_S} and sys.getswitchinterval() == usual_s


def test_threads_that_take_turns_keep_their_pace_while_they_are_looked_at() -> None:
    def work(stopped: threading.Event) -> None:
        while not stopped.is_set():
            _spin(400_000)

    usual_s = sys.getswitchinterval()
    _, intervals = _looked_at(work)
    assert intervals == {usual_s} and sys.getswitchinterval() == usual_s


@pytest.mark.parametrize("set_s", [0.002, SOON_S / 2])
def test_an_interval_that_the_program_sets_in_a_window_stays(set_s: float) -> None:
    usual_s = sys.getswitchinterval()
    turns = _Turns()
    try:
        turns.soon()
        assert sys.getswitchinterval() == pytest.approx(SOON_S)
        sys.setswitchinterval(set_s)
        turns.as_usual()
        assert sys.getswitchinterval() == pytest.approx(set_s)
    finally:
        sys.setswitchinterval(usual_s)


def test_stacks_are_looked_at_until_the_limit_though_threads_come_and_go() -> None:
    is_over, native, most = threading.Event(), set[int](), time.monotonic() + 10

    def work() -> None:
        native.add(threading.get_native_id())
        is_over.wait(0.01)

    sampler = Sampler(threading.get_ident(), True, 0.3, is_over.set)
    sampler.start()
    while not is_over.is_set() and time.monotonic() < most:
        # Python gives the next thread the number of the one that has ended; the system does not.
        brief = threading.Thread(target=work)
        brief.start()
        brief.join()
    sampler.stop()
    sampler.thread.join()
    assert is_over.is_set()
    tids = [thread.tid for thread in sampler.seen()]
    assert len(native & set(tids)) > 1 and len(tids) == len(set(tids))


def test_a_thread_that_has_ended_since_the_list_was_made_is_asked_nothing() -> None:
    """The C library reads a thread's clock from the thread's memory, and with that gone the process is, too."""
    brief = threading.Thread(target=time.monotonic_ns)
    brief.start()
    brief.join()
    sampler = Sampler(threading.get_ident(), True, 5.0, lambda: None)
    assert brief.ident is not None
    assert sampler._met(brief.ident, (sys._getframe().f_code,)) is None and not sampler.seen()
    assert _tids()[threading.get_ident()] == threading.get_native_id()


COLLECTING = """
import gc, sys, threading, time
from eroica.probe import frames

frames.MOST_SAMPLES = 10**9
gc.set_threshold(3)
gc.callbacks.append(lambda phase, info: sum(range(200)))
sys.setswitchinterval(1e-5)
is_over = threading.Event()

def brief():
    pass

def come_and_go():
    while not is_over.is_set():
        thread = threading.Thread(target=brief)
        thread.start()
        thread.join()

for _ in range(5):
    threading.Thread(target=come_and_go, daemon=True).start()
sampler = frames.Sampler(threading.get_ident(), True, 60.0, is_over.set)
ends = time.monotonic() + 2
while time.monotonic() < ends:
    sampler._look()
is_over.set()
assert gc.isenabled()
"""


def test_collections_of_garbage_in_the_midst_of_a_look_stop_and_end_nothing() -> None:
    """python/cpython#106883: without care two of three such runs hang or end by a signal, before Python 3.11.9."""
    ended = subprocess.run([sys.executable, "-c", COLLECTING], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize("is_on", [True, False])
def test_a_look_leaves_collections_as_they_were_also_if_it_fails(is_on: bool) -> None:
    was_on = gc.isenabled()
    try:
        (gc.enable if is_on else gc.disable)()
        assert _undisturbed(map(abs, (-1, 2))) == [1, 2] and gc.isenabled() is is_on
        with pytest.raises(ValueError):
            _undisturbed(map(int, ("no number",)))
        assert gc.isenabled() is is_on
    finally:
        (gc.enable if was_on else gc.disable)()


def test_stacks_of_other_threads_are_whole_up_to_their_depth() -> None:
    is_over = threading.Event()

    def down(depth: int) -> None:
        if depth:
            down(depth - 1)
        else:
            is_there.release()
            is_over.wait(60)

    is_there = threading.Semaphore(0)
    depths = [0, 3, 40, 400]
    threads = [threading.Thread(target=down, args=(depth,)) for depth in depths]
    for thread in threads:
        thread.start()
        is_there.acquire()
    stacks = _stacks()
    is_over.set()
    for thread, depth in zip(threads, depths, strict=True):
        assert thread.ident is not None
        stack = stacks[thread.ident]
        inner = [code.co_name for code in stack].index("down")  # below it, the wait
        assert [code is down.__code__ for code in stack[inner:]].count(True) == min(depth + 1, MOST_DEPTH - inner)
        assert (stack[-1].co_name == "_bootstrap") is (depth < 100)
        thread.join()
    assert threading.get_ident() not in stacks


def test_a_look_leaves_nothing_for_a_garbage_collector() -> None:
    gc.collect()
    was_on = gc.isenabled()
    gc.disable()
    try:
        for _ in range(20):
            _stacks()
        assert gc.collect() == 0
    finally:
        (gc.enable if was_on else gc.disable)()

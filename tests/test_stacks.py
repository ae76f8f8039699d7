"""Stacks from outside and from inside, what their source tells of locks, what /proc tells, torch's flight recorder."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from eroica import processes, stacks
from eroica.probe.place import prune
from eroica.ring import Ring
from eroica.source import Source
from eroica.torchflight import parse_flight_recorder, read_flight_recorder

ROOT = Path(__file__).parent.parent


def _script(folder: Path, text: str) -> subprocess.Popen[str]:
    """A Python process that has printed a line."""
    script = folder / "script.py"
    script.write_text(textwrap.dedent(text))
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    started = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environ)
    assert started.stdout is not None and started.stdout.readline()
    return started


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def _line(text: str) -> int:
    """Number of the line that is marked."""
    return next(number for number, line in enumerate(text.splitlines(), 1) if "<--" in line)


def test_threads_are_seen_with_their_lines_and_the_locks_that_they_want_and_hold(tmp_path: Path) -> None:
    process = _script(
        tmp_path,
        """
        import threading
        first, second, both = threading.Lock(), threading.Lock(), threading.Barrier(2)
        def work():
            with second:
                both.wait()
                with first:
                    pass
        threading.Thread(target=work, name="worker").start()
        with first:
            both.wait()
            print("there", flush=True)
            second.acquire()
        """,
    )
    try:
        while True:  # until both have come to their locks
            taken = stacks.dump(process.pid)
            assert not taken.reason
            if all(thread.waits_for for thread in taken.threads):
                break
    finally:
        _end(process)
    main, worker = taken.threads
    assert (main.is_main, main.waits_for, [held.name for held in main.holds]) == (True, "second", ["first"])
    assert (worker.name, worker.waits_for, [held.name for held in worker.holds]) == ("worker", "first", ["second"])
    assert (main.frames[0].source, worker.frames[0].source) == ("second.acquire()", "with first:")


def test_a_process_that_is_stopped_or_holds_the_gil_in_c_shows_its_stack(tmp_path: Path) -> None:
    process = _script(
        tmp_path,
        """
        import ctypes
        def hold():
            library = ctypes.PyDLL(None)
            print("there", flush=True)
            library.sleep(600)
        hold()
        """,
    )
    try:
        # It has written its line without the interpreter, and takes that back a moment later.
        held = next((seen for _ in range(100) if (seen := stacks.dump(process.pid)).threads[0].has_gil), None)
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        stopped = stacks.dump(process.pid)
        after = processes.process(process.pid)
    finally:
        _end(process)
    assert held is not None and held.threads[0].frames[0].function == "hold"
    assert stopped.threads[0].frames[0].function == "hold"
    assert after is not None and after.letter == "T"


def test_a_process_that_is_gone_has_a_reason_instead_of_a_stack() -> None:
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    assert stacks.dump(done.pid).reason == f"no stacks: process {done.pid} is gone"


def test_one_who_may_not_trace_is_told_the_way_out() -> None:
    said = stacks._reason(1, "Error: Permission Denied: Try running again with elevated permissions")
    assert "may not be traced" in said and "CAP_SYS_PTRACE" in said and "ptrace_scope" in said


def test_children_and_exit_statuses_are_read_while_the_dead_have_an_entry() -> None:
    dead = subprocess.Popen([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])
    failed = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    alive = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        for process in (dead, failed):
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # and leave the entry
        seen = {child.pid: (child.state, child.exit_status) for child in processes.children(os.getpid())}
    finally:
        alive.kill()
        for process in (dead, failed, alive):
            process.communicate()
    assert seen[dead.pid] == ("dead", -9)
    assert seen[failed.pid] == ("dead", 3)
    assert seen[alive.pid] == ("alive", None)
    assert processes.process(dead.pid) is None and processes.children(dead.pid) == ()


@pytest.mark.parametrize(
    ("code", "waits_for", "holds"),
    [
        ("def f():\n    with a_lock:\n        g()  # <--", "", ["a_lock"]),
        ("def f():\n    with a_lock:  # <--\n        g()", "a_lock", []),
        ("def f(self):\n    self.lock.acquire()\n    g()  # <--", "", ["self.lock"]),
        ("def f(self):\n    self.lock.acquire()\n    self.lock.release()\n    g()  # <--", "", []),
        (
            "def f(self):\n    self.lock.acquire()\n    try:\n        g()  # <--\n    finally:\n        pass",
            "",
            ["self.lock"],
        ),
        ("x.acquire()\ny.acquire()  # <--", "y", ["x"]),
        ("x = threading.Lock()\nwith x:\n    with open('y') as f:\n        g()  # <--", "", ["x"]),
        ("with open('lock') as f:  # <--\n    g()", "", []),
        ("with a_lock:\n    def f():\n        g()  # <--", "", []),
        ("async def f(:\n    x.acquire()  # <--", "", []),
        ("with a_lock, b_lock:\n    g()  # <--", "", ["a_lock", "b_lock"]),
    ],
)
def test_the_lines_of_a_stack_tell_which_lock_is_wanted_and_which_are_held(
    code: str, waits_for: str, holds: list[str]
) -> None:
    line = Source(code).line(_line(code))
    assert (line.waits_for, [name for name, _ in line.holds]) == (waits_for, holds)
    assert line.text


def test_a_line_in_a_handler_is_told_from_one_in_a_clean_up() -> None:
    code = "try:\n    a()\nexcept ValueError:\n    b()\nfinally:\n    if x:\n        c()\nd()\n"
    assert Source("# a page\n\f\nx = '\u2028'\nwork()\r\n").line(4).text == "work()"
    assert [Source(code).line(number).block for number in (2, 4, 7, 8, 99)] == ["", "except", "finally", "", ""]


def test_what_faulthandler_writes_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "x.stacks"
    with path.open("w") as file:
        faulthandler.dump_traceback(file, all_threads=True)
    threads = stacks.parse_faulthandler(path.read_text())
    assert threads[0].is_main
    assert threads[0].frames[0].function == "test_what_faulthandler_writes_is_read_back"
    assert "faulthandler.dump_traceback(" in threads[0].frames[0].source
    assert stacks.parse_faulthandler("Fatal\n\x00 File nonsense\n") == ()


def test_the_timer_writes_while_c_code_holds_the_gil_and_leaves_the_users_own_alone(tmp_path: Path) -> None:
    text = """
        import ctypes, sys
        from pathlib import Path
        from time import monotonic_ns
        from eroica.probe import fallback
        from eroica.ring import Ring
        fallback.AFTER_S = 0.2
        ring = Ring.create(Path(sys.argv[0]).with_name("rank0-1.ring"), rank=0, world_size=1)
        one = fallback.Fallback()
        one.watch()
        one.step(ring, monotonic_ns())
        one.step(ring, monotonic_ns())
        print("there", flush=True)
        ctypes.PyDLL(None).sleep(600)
        """
    process = _script(tmp_path, text)
    path = tmp_path / "rank0-1.stacks"
    try:
        while "most recent call first" not in path.read_text() or not path.read_text().endswith("<module>\n"):
            with contextlib.suppress(subprocess.TimeoutExpired):
                assert process.wait(0.05) is None
    finally:
        _end(process)
    (thread,) = stacks.parse_faulthandler(path.read_text())
    assert thread.frames[0].source == "ctypes.PyDLL(None).sleep(600)"
    assert path.stat().st_mode & 0o777 == 0o600
    theirs = text.replace("one.step", "import faulthandler; faulthandler.dump_traceback_later(900); one.step", 1)
    path.unlink()
    _end(_script(tmp_path, theirs))
    assert not path.exists()


def test_a_process_that_a_library_aborts_leaves_its_stacks_and_its_children_do_not_write_there(tmp_path: Path) -> None:
    text = """
        import os, sys
        from pathlib import Path
        from time import monotonic_ns
        from eroica.probe import fallback
        from eroica.ring import Ring
        ring = Ring.create(Path(sys.argv[0]).with_name("rank0-1.ring"), rank=0, world_size=1)
        one = fallback.Fallback()
        one.watch()
        one.step(ring, monotonic_ns())
        if not os.fork():
            one.forked()
            os.abort()
        os.wait()
        print(os.path.getsize(Path(sys.argv[0]).with_name("rank0-1.stacks")), flush=True)
        def broken():
            os.abort()
        broken()
        """
    process = _script(tmp_path, text)
    process.communicate()
    assert process.returncode == -signal.SIGABRT
    (thread,) = stacks.parse_faulthandler((tmp_path / "rank0-1.stacks").read_text())
    assert [frame.function for frame in thread.frames] == ["broken", "<module>"]


def test_an_empty_file_of_stacks_goes_with_the_process(tmp_path: Path) -> None:
    ring = Ring.create(tmp_path / "rank0-1.ring", rank=0, world_size=1)
    from eroica.probe.fallback import Fallback

    one = Fallback()
    original = faulthandler.dump_traceback_later
    try:
        one.watch()
        one._is_off = False  # this file imports faulthandler, and so may the main script here
        one.step(ring, 6 * 10**9)
        assert (tmp_path / "rank0-1.stacks").exists()
        one.cancel()
    finally:
        faulthandler.dump_traceback_later = original
        ring.close()
    assert not (tmp_path / "rank0-1.stacks").exists()


def test_stacks_are_deleted_with_their_ring(tmp_path: Path) -> None:
    for index in range(2):
        (tmp_path / f"job{index}").mkdir()
        for name in ("rank0-1.ring", "rank0-1.stacks"):
            (tmp_path / f"job{index}" / name).touch()
            os.utime(tmp_path / f"job{index}" / name, (index, index))
    prune(tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["job1"]


def test_torchs_flight_recorder_tells_positions_and_its_damage_tells_nothing(tmp_path: Path) -> None:
    entry = {
        "collective_seq_id": 1, "input_dtypes": ["Float"], "input_sizes": [[4, 2]], "is_p2p": False, "p2p_seq_id": 0,
        "pg_id": 0, "process_group": ["0", "default_pg"], "profiling_name": "gloo:all_reduce", "retired": True,
        "state": "scheduled",
    }  # fmt: skip
    pending = entry | {"collective_seq_id": 2, "retired": False, "profiling_name": "nccl:_all_gather_base"}
    data = {
        "entries": [entry, pending, {"x": 1}, None],
        "pg_config": {"": {"name": "", "ranks": "[0"}},
        "version": "2.10",
    }
    path = tmp_path / "rank0-1.fr.json"
    path.write_text(json.dumps(data))
    groups, calls = read_flight_recorder(path)
    assert [group.name for group in groups if group.name == "default_pg"] == ["default_pg"]
    assert [(call.op, call.sequence, call.status, call.num_bytes, call.dtype) for call in calls] == [
        ("allreduce", 1, "done", 32, "float32"),
        ("all_gather_base", 2, "in", 32, "float32"),
    ]
    for bad in ("", "[]", "{}", '{"entries": 3, "pg_config": 4}', "[" * 9000):
        path.write_text(bad)
        assert read_flight_recorder(path)[1] == ()
    assert read_flight_recorder(tmp_path / "absent") == ((), ())
    assert parse_flight_recorder({"pg_config": {"0": {"name": "0", "desc": "dp", "ranks": "[0, 1]"}}})[0][
        0
    ].members == (0, 1)


def test_programs_are_read_in_several_threads_at_once() -> None:
    text = Path(stacks.__file__).read_text()

    def turn(phase: str, told: Mapping[str, int]) -> None:
        time.sleep(0)  # a collection within a parse lets other threads go on

    thresholds = gc.get_threshold()
    gc.callbacks.append(turn)
    gc.set_threshold(20)
    try:
        with ThreadPoolExecutor(4) as pool:
            assert all(source.line(1).text for source in pool.map(Source, [text] * 8))
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(turn)

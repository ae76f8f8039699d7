"""Jobs started armed: real processes under a small watcher; what arms, what does not, and that nobody notices."""

from __future__ import annotations

import ast
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eroica import launch
from eroica.probe import workspace

ROOT = Path(__file__).parent.parent
WATCHER = str(ROOT / "tests" / "watcher.py")
TRAIN = str(ROOT / "tests" / "launch_train.py")
PYTHON = sys.executable
LIMIT_S = 240
"""For anything that another process is to do; never reached unless something hangs."""
_CLEARED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "PYTHONPATH", "XDG_RUNTIME_DIR")
SMALL_RANK = "from eroica.probe.recorder import RECORDER; ring = RECORDER.arm()"
"""What the first step of a rank comes to, without the seconds that torch takes to import."""


def _environ(tmp_path: Path, **more: str) -> dict[str, str]:
    """Rings go to a folder of the test's own, and torch is a stand-in where nothing is trained."""
    (tmp_path / "run").mkdir(mode=0o700, exist_ok=True)
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in _CLEARED and not name.startswith(("EROICA", "SLURM", "TORCHELASTIC"))
    }
    return {**kept, "XDG_RUNTIME_DIR": str(tmp_path / "run"), "OMP_NUM_THREADS": "1", **more}


def _stand_in(tmp_path: Path) -> str:
    """A folder with a package called torch, for PYTHONPATH."""
    folder = tmp_path / "packages"
    (folder / "torch").mkdir(parents=True)
    (folder / "torch" / "__init__.py").touch()
    return str(folder)


def _watcher(*command: str) -> list[str]:
    return [PYTHON, "-I", WATCHER, *command]


def _run(environ: dict[str, str], *command: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(_watcher(*command), env=environ, capture_output=True, text=True, timeout=LIMIT_S, **options)


def _ranks(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    found = json.loads(done.stderr.splitlines()[-1])
    assert isinstance(found, list)
    return found


def _until(holds: Callable[[], bool]) -> None:
    """Wait for what another process does."""
    end = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < end
        select.select([], [], [], 0.02)


def _left(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "run").rglob("*"))


def test_a_python_that_imports_no_torch_is_as_if_nothing_were_there(tmp_path: Path) -> None:
    code = """
import sys
print(sys.path, [type(finder).__name__ for finder in sys.meta_path if type(finder).__name__ != "_UntilTorch"])
names = [name for name in sys.modules if not name.startswith("__editable__")]
print(sorted(name for name in names if "eroica" in name or "custom" in name))
"""
    environ = _environ(tmp_path, PYTHONPATH="/nowhere/user")
    bare = subprocess.run([PYTHON, "-c", code], env=environ, capture_output=True, text=True, check=True)
    done = _run(environ, PYTHON, "-c", code)
    assert done.returncode == 0 and _ranks(done) == []
    # Some systems bring a sitecustomize of their own, which runs as ever.
    assert done.stdout == bare.stdout and "/nowhere/user" in bare.stdout and "eroica" not in bare.stdout.splitlines()[1]
    assert _left(tmp_path) == []


def test_the_users_own_sitecustomize_runs_and_its_errors_are_told_as_ever(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    file = own / "sitecustomize.py"
    file.write_text("import sys; print('own', __file__ in sys.modules['sitecustomize'].__file__)")
    environ = _environ(tmp_path, PYTHONPATH=str(own))
    assert _run(environ, PYTHON, "-c", "import sitecustomize").stdout == "own True\n"
    for text in ("1 / 0", "import absent_module", "raise ImportError('odd')"):
        file.write_text(text)
        bare = subprocess.run([PYTHON, "-c", "print(1)"], env=environ, capture_output=True, text=True)
        assert bare.stderr.startswith("Error in sitecustomize")
        done = _run(environ, PYTHON, "-c", "print(1)")
        assert done.stdout == "1\n" and done.stderr.splitlines()[1:-1] == bare.stderr.splitlines()


def test_a_job_whose_environment_has_no_eroica_is_armed_and_nothing_of_its_own_is_hidden(tmp_path: Path) -> None:
    code = f"import torch, sys; {SMALL_RANK}; print(ring is not None, ROOT in sys.path)"
    done = _run(
        _environ(tmp_path, PYTHONPATH=_stand_in(tmp_path)), PYTHON, "-c", f"ROOT = {str(ROOT)!r}; {code}", cwd=tmp_path
    )
    assert done.stdout == "True False\n", done.stderr
    assert _ranks(done) == [{"rank": 0, "of": 1, "steps": 0, "by": "single", "start": 0, "ended": True}]
    assert _left(tmp_path) == []


def test_a_module_of_the_user_that_is_called_eroica_stays_theirs(tmp_path: Path) -> None:
    packages = _stand_in(tmp_path)
    (Path(packages) / "eroica.py").write_text("symphony = 3")
    environ = _environ(tmp_path, PYTHONPATH=packages)
    done = _run(environ, PYTHON, "-c", "import torch, eroica; print(eroica.symphony)", cwd=tmp_path)
    assert done.stdout == "3\n" and _ranks(done) == []


@pytest.mark.parametrize("options", ["-I", "-S", "-E"])
def test_a_python_that_hears_of_no_pythonpath_runs_unarmed_and_unharmed(tmp_path: Path, options: str) -> None:
    done = _run(_environ(tmp_path), PYTHON, options, "-c", "import sys; print('eroica' in sys.modules, len(sys.argv))")
    assert done.stdout == "False 1\n" and _ranks(done) == []


def test_an_empty_environment_leaves_the_job_unarmed_and_unharmed(tmp_path: Path) -> None:
    done = _run(_environ(tmp_path), "/usr/bin/env", "-i", PYTHON, "-c", "import os; print('PYTHONPATH' in os.environ)")
    assert done.stdout == "False\n" and _ranks(done) == []


def test_launchers_take_no_part_and_what_they_start_does(tmp_path: Path) -> None:
    script = tmp_path / "torchrun"
    script.write_text(
        f"import subprocess, sys, torch; {SMALL_RANK}; print(ring, [type(f).__module__ for f in sys.meta_path])\n"
        f"sys.stdout.flush(); subprocess.run([sys.executable, '-c', {f'import torch; {SMALL_RANK}; print(ring)'!r}])"
    )
    script.write_text(script.read_text().replace(SMALL_RANK, "ring = None", 1))
    done = _run(_environ(tmp_path, PYTHONPATH=_stand_in(tmp_path)), PYTHON, str(script))
    first, second = done.stdout.splitlines()
    assert first.startswith("None") and "eroica" not in first and "sitecustomize" not in first
    assert "Ring object" in second
    assert [rank["by"] for rank in _ranks(done)] == ["single"]


def test_a_script_that_clears_its_environment_and_goes_elsewhere_is_a_rank_still(tmp_path: Path) -> None:
    code = f"import os; os.environ.clear(); os.chdir('/'); import torch; {SMALL_RANK}; print(ring.path.parent)"
    done = _run(_environ(tmp_path, PYTHONPATH=_stand_in(tmp_path)), PYTHON, "-c", code)
    assert done.stdout.strip() == done.stderr.split()[0]
    assert len(_ranks(done)) == 1 and _left(tmp_path) == []


def test_helpers_of_a_rank_are_no_ranks_and_a_second_training_after_the_first_is_one(tmp_path: Path) -> None:
    code = f"import torch; {SMALL_RANK}; print(ring is not None, flush=True)"
    helped = f"{code}; import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])"
    environ = _environ(tmp_path, PYTHONPATH=_stand_in(tmp_path))
    script = f'"{PYTHON}" -c "$0"; "{PYTHON}" -c "$1"; RANK=3 WORLD_SIZE=4 exec "{PYTHON}" -c "$0"'
    done = _run(environ, "bash", "-c", script, helped, code)
    assert done.stdout.split() == ["True", "False", "True", "True", "False"]
    assert [(rank["rank"], rank["of"], rank["by"]) for rank in _ranks(done)] == [
        *((0, 1, "single"), (0, 1, "single"), (3, 4, "launcher")),
    ]


def test_a_process_that_replaces_itself_is_the_same_rank(tmp_path: Path) -> None:
    code = f"import torch, os, sys; {SMALL_RANK}; print(ring is not None, flush=True)"
    chain = f"{code}; os.execv(sys.executable, [sys.executable, '-c', {code!r}])"
    done = _run(_environ(tmp_path, PYTHONPATH=_stand_in(tmp_path)), PYTHON, "-c", chain)
    assert done.stdout.split() == ["True", "True"] and len(_ranks(done)) == 1


def test_tasks_of_slurm_are_ranks_and_a_batch_script_is_none_of_them(tmp_path: Path) -> None:
    code = f"import torch; {SMALL_RANK}; input()"
    script = f"""
        export SLURM_JOB_ID=7 SLURM_PROCID=0 SLURM_NTASKS=8
        echo | "{PYTHON}" -c "$0"
        export SLURM_STEP_NUM_TASKS=2
        (echo | SLURM_PROCID=0 "{PYTHON}" -c "$0") & (echo | SLURM_PROCID=1 "{PYTHON}" -c "$0") & wait
    """
    done = _run(_environ(tmp_path, PYTHONPATH=_stand_in(tmp_path)), "bash", "-c", script, code)
    assert sorted((rank["rank"], rank["of"], rank["by"]) for rank in _ranks(done)) == [
        *((0, 1, "single"), (0, 2, "slurm"), (1, 2, "slurm")),
    ]


def test_off_means_off(tmp_path: Path) -> None:
    code = "import torch, sys; print('eroica' in sys.modules)"
    done = _run(_environ(tmp_path, PYTHONPATH=_stand_in(tmp_path), EROICA="0"), PYTHON, "-c", code)
    assert done.stdout == "False\n"


def test_what_every_python_runs_compiles_under_old_ones() -> None:
    tree = ast.parse((launch.ARMING / "sitecustomize.py").read_text())
    for node in ast.walk(tree):
        assert not isinstance(node, (ast.JoinedStr, ast.AnnAssign, ast.NamedExpr, ast.AsyncFunctionDef, ast.Match))
        if isinstance(node, ast.FunctionDef):
            assert node.returns is None
            assert not any(argument.annotation for argument in node.args.args) and not node.args.kwonlyargs
    assert [path.name for path in launch.ARMING.iterdir() if path.suffix == ".py"] != []
    assert {path.stem for path in launch.ARMING.glob("*.py")} == {"__init__", "sitecustomize"}


def test_the_environment_keeps_what_the_user_had(tmp_path: Path) -> None:
    arming = str(launch.ARMING)
    made = launch.environment_for(tmp_path, {"A": "2"}, base={"PYTHONPATH": "/x::/y", "A": "1", "B": "3"})
    assert made["PYTHONPATH"] == f"{arming}:/x::/y" and made["A"] == "2" and made["B"] == "3"
    assert made["EROICA_RING_DIR"] == os.path.realpath(tmp_path)
    assert launch.environment_for(tmp_path, {}, base=made)["PYTHONPATH"] == made["PYTHONPATH"]
    assert launch.environment_for(tmp_path, {}, base={"PYTHONPATH": ""})["PYTHONPATH"] == arming


def test_the_exit_status_is_the_commands_own(tmp_path: Path) -> None:
    environ = _environ(tmp_path)
    plain = tmp_path / "plain"
    plain.write_text("exit $#\n")
    assert _run(environ, "sh", "-c", "exit 5").returncode == 5
    assert _run(environ, "sh", "-c", "kill -9 $$").returncode == 137
    for command, status, said in [
        ("no-such-program", 127, "command not found"),
        (str(plain), 126, "not executable"),
        (str(tmp_path), 126, "is a folder"),
    ]:
        done = _run(environ, command)
        assert done.returncode == status and said in done.stderr and len(done.stderr.splitlines()) == 1
    plain.chmod(0o755)
    assert _run(environ, str(plain), "a", "b").returncode == 2
    plain.write_text("#!/no/such/interpreter\n")
    done = _run(environ, str(plain))
    assert done.returncode == 127 and "interpreter" in done.stderr
    assert _left(tmp_path) == []


def test_streams_and_open_files_go_to_the_job_untouched(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.write(write, b"from the pipe\n")
    os.close(write)
    done = _run(
        _environ(tmp_path), "sh", "-c", f"cat; cat /dev/fd/{read}; echo loud >&2", input="typed\n", pass_fds=[read]
    )
    os.close(read)
    assert done.stdout == "typed\nfrom the pipe\n" and "loud" in done.stderr


NOTES_SIGNALS = """
import os, select, signal, sys
def note(number, frame):
    os.write(1, (signal.Signals(number).name + "\\n").encode())
    if number == signal.SIGTERM:
        sys.exit(9)
for name in ("SIGHUP", "SIGINT", "SIGQUIT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGWINCH", "SIGCONT"):
    signal.signal(getattr(signal, name), note)
# What comes right before `signal.pause` would be noted after the next one only, if any comes.
wake, woken = os.pipe()
os.set_blocking(woken, False)
signal.set_wakeup_fd(woken)
print("ready", flush=True)
while True:
    select.select([wake], [], [])
    os.read(wake, 1)
"""


def test_signals_reach_the_job_once_whether_sent_to_us_or_to_all(tmp_path: Path) -> None:
    command = _watcher(PYTHON, "-c", NOTES_SIGNALS)
    watcher = subprocess.Popen(
        command, env=_environ(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    assert watcher.stdout is not None
    out = watcher.stdout

    def said() -> str:
        return out.readline().decode().strip()

    assert said() == "ready"
    for name in ("SIGHUP", "SIGINT", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGWINCH", "SIGCONT"):
        number = getattr(signal, name)
        os.kill(watcher.pid, number)
        assert said() == name
        os.killpg(watcher.pid, number)
        assert said() == name
    # Had any of them come twice, its second would stand before the last.
    os.kill(watcher.pid, signal.SIGTERM)
    assert said() == "SIGTERM"
    assert watcher.wait(LIMIT_S) == 9
    assert watcher.stdout.read() == b""
    watcher.stdout.close()
    assert watcher.stderr is not None
    watcher.stderr.close()


def test_what_is_ignored_stays_ignored(tmp_path: Path) -> None:
    code = "import signal; print(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN, signal.getsignal(signal.SIGPIPE))"
    nohup = ["sh", "-c", "trap '' HUP; exec \"$@\"", "sh", *_watcher("sh", "-c", f'"{PYTHON}" -c "{code}"; trap')]
    done = subprocess.run(nohup, env=_environ(tmp_path), capture_output=True, text=True, timeout=LIMIT_S)
    assert done.stdout.startswith("True")


def test_at_a_terminal_ctrl_c_comes_once_and_ctrl_z_stops_both(tmp_path: Path) -> None:
    environ = _environ(tmp_path, PS1="$ ")
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve("/bin/bash", ["bash", "--norc", "--noprofile", "-i"], environ)
    shown = ""

    def until(text: str) -> None:
        nonlocal shown
        end = time.monotonic() + LIMIT_S
        while text not in shown:
            assert time.monotonic() < end and select.select([terminal], [], [], LIMIT_S)[0], shown
            shown += os.read(terminal, 4096).decode(errors="replace").replace("\r", "")
        shown = shown[shown.index(text) + len(text) :]

    (tmp_path / "job.py").write_text(NOTES_SIGNALS)
    command = " ".join(_watcher(PYTHON, "job.py"))
    os.write(terminal, f"cd '{tmp_path}'; {command}\n".encode())
    until("\nready\n")
    os.write(terminal, b"\x03")
    until("SIGINT\n")
    os.write(terminal, b"\x1a")
    until("Stopped")
    os.write(terminal, b"fg\n")
    until("SIGCONT\n")
    os.write(terminal, b"\x03")
    until("SIGINT\n")
    os.write(terminal, b"\x1c")
    until("SIGQUIT\n")
    os.write(terminal, b"\x1a")
    until("Stopped")
    os.write(terminal, b"kill %1; fg\n")
    until("SIGTERM\n")
    assert shown.replace("SIGCONT", "").count("SIG") == 0
    os.write(terminal, b"exit; exit\n")
    until("exit")
    os.close(terminal)
    os.waitpid(pid, 0)


def test_when_the_watcher_is_killed_training_goes_on_and_nothing_is_left(tmp_path: Path) -> None:
    code = f"import torch; {SMALL_RANK}; print('armed', flush=True); input(); print('trained', flush=True)"
    read, write = os.pipe()
    watcher = subprocess.Popen(
        _watcher(PYTHON, "-c", code),
        env=_environ(tmp_path, PYTHONPATH=_stand_in(tmp_path)),
        stdin=read,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    os.close(read)
    assert watcher.stdout is not None and watcher.stderr is not None
    assert watcher.stdout.readline() == b"armed\n"
    folder, job = watcher.stderr.readline().decode().split()
    assert Path(folder).stat().st_mode & 0o777 == 0o700
    watcher.kill()
    watcher.wait(LIMIT_S)
    assert [path.suffix for path in Path(folder).iterdir()] == [".ring"]  # the rank lives
    os.write(write, b"go on\n")
    assert watcher.stdout.readline() == b"trained\n"
    os.close(write)
    # The end of all of them: the witness, too, held our end of stderr's pipe no longer.
    assert watcher.stderr.read() == b"" and watcher.stdout.read() == b""
    _until(lambda: not Path("/proc", job).exists() or "Z" in Path("/proc", job, "stat").read_text().split())
    assert _left(tmp_path) == []
    for stream in (watcher.stdout, watcher.stderr):
        stream.close()
    _until(lambda: _members(watcher.pid) == [])


def _members(session: int) -> list[int]:
    """Processes of a session that run, by /proc."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                state, _, _, its_session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            except OSError:
                continue
            if int(its_session) == session and state not in "ZX":
                found.append(int(folder.name))
    return found


def test_what_killed_runs_left_is_cleared_by_the_next_unless_a_rank_lives(tmp_path: Path) -> None:
    environ = _environ(tmp_path, PYTHONPATH=_stand_in(tmp_path))
    code = f"import torch; {SMALL_RANK}; print('armed', flush=True); input()"
    folders, jobs, watchers = [], [], []
    read, write = os.pipe()
    for _ in range(2):
        watcher = subprocess.Popen(
            _watcher(PYTHON, "-c", code),
            env=environ,
            stdin=read,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert watcher.stdout is not None and watcher.stderr is not None
        folder, job = watcher.stderr.readline().decode().split()
        assert watcher.stdout.readline() == b"armed\n"
        watcher.kill()
        watcher.wait(LIMIT_S)
        watcher.stdout.close()
        watcher.stderr.close()
        folders.append(Path(folder))
        jobs.append(int(job))
        watchers.append(watcher)
    os.kill(jobs[0], signal.SIGKILL)
    _until(lambda: workspace.is_abandoned(folders[0]))
    assert not workspace.is_abandoned(folders[1])
    with launch.Workspace.create(environ) as own:
        assert own.path.is_dir() and not folders[0].exists() and folders[1].is_dir()
        assert not workspace.is_abandoned(own.path)
    assert not own.path.exists()
    os.close(write)  # the other's input ends; it leaves by EOFError
    os.close(read)
    _until(lambda: not folders[1].exists())
    assert _left(tmp_path) == []


def test_a_folder_of_another_host_is_left_alone_until_it_is_old(tmp_path: Path) -> None:
    folder = tmp_path / "run-1-2-xyzxyz".replace("xyz", "fff")
    folder.mkdir()
    (folder / "rank0-1.ring").touch()
    workspace.sweep(tmp_path)
    assert folder.exists()
    os.utime(folder / "rank0-1.ring", (1, 1))
    os.utime(folder, (1, 1))
    other = tmp_path / "run-of-mine"
    other.mkdir()
    os.utime(other, (1, 1))
    workspace.sweep(tmp_path)
    assert not folder.exists() and other.exists()


def test_where_the_users_folder_cannot_be_used_another_place_is(tmp_path: Path) -> None:
    (tmp_path / "eroica").mkdir(mode=0o777)
    (tmp_path / "eroica").chmod(0o777)
    with launch.Workspace.create({"XDG_RUNTIME_DIR": str(tmp_path)}) as own:
        assert own.path.is_dir() and tmp_path not in own.path.parents
    assert not own.path.exists()


def _torchrun(*options: str) -> list[str]:
    return [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *options, TRAIN]


@pytest.mark.e2e
@pytest.mark.full
def test_torchrun_is_watched_through_its_restarts(tmp_path: Path) -> None:
    done = _run(_environ(tmp_path), *_torchrun("--max-restarts", "1"), "--fail-once", str(tmp_path / "failed"))
    assert done.stdout.count("trained") == 2, done.stderr
    ranks = _ranks(done)
    assert [(rank["start"], rank["rank"], rank["of"], rank["steps"], rank["by"]) for rank in ranks] == [
        *((start, rank, 2, 4, "launcher") for start in (0, 1) for rank in (0, 1)),
    ]
    assert [rank["ended"] for rank in ranks] == [True, False, True, True]  # the launcher ended the second by SIGTERM
    assert _left(tmp_path) == []


@pytest.mark.e2e
def test_plain_python_is_a_world_of_one_and_its_loaders_workers_are_not_in_it(tmp_path: Path) -> None:
    done = _run(_environ(tmp_path), "bash", "-c", f'cd /; exec "{PYTHON}" "{TRAIN}" --workers 2')
    assert done.returncode == 3 and done.stdout == "trained\n", done.stderr
    assert _ranks(done) == [{"rank": 0, "of": 1, "steps": 4, "by": "single", "start": 0, "ended": True}]


@pytest.mark.e2e
def test_ranks_that_torch_multiprocessing_spawns_are_known_by_their_group(tmp_path: Path) -> None:
    done = _run(_environ(tmp_path), PYTHON, TRAIN, "--spawn", str(tmp_path / "meeting"))
    assert done.returncode == 3 and done.stdout == "trained\n", done.stderr
    assert [(rank["rank"], rank["of"], rank["steps"], rank["by"], rank["ended"]) for rank in _ranks(done)] == [
        *((0, 2, 4, "group", True), (1, 2, 4, "group", True)),
    ]


@pytest.mark.e2e
@pytest.mark.full
def test_torchrun_goes_on_without_its_watcher_and_its_last_rank_clears_up(tmp_path: Path) -> None:
    meeting = tmp_path / "go"
    watcher = subprocess.Popen(
        _watcher(*_torchrun(), "--wait", str(meeting)),
        env=_environ(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert watcher.stdout is not None
    _until(lambda: sum(name.endswith(".ring") for name in _left(tmp_path)) == 2)
    watcher.kill()
    watcher.wait(LIMIT_S)
    meeting.touch()
    assert watcher.stdout.read().decode().count("trained") == 2
    watcher.stdout.close()
    _until(lambda: _members(watcher.pid) == [])
    assert _left(tmp_path) == []

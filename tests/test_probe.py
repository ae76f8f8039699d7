"""The probe in real processes: when it arms, what it sees, and that training cannot tell that it is there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from eroica import ring as flight
from eroica.probe.place import folder_name, job_name, prune, ring_folder
from eroica.probe.recorder import Recorder
from eroica.ring import COLLECTIVE, OPS, P2P, Flight, read_flight

ROOT = Path(__file__).parent.parent
JOB = ROOT / "tests" / "probe_job.py"
LOOPS = ROOT / "tests" / "probe_loops.py"
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID")


def _environ(**more: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if name not in LAUNCHER and name[:6] != "EROICA"}
    return {**clean, "PYTHONPATH": str(ROOT), **more}


def _run(*command: str, **more: str) -> str:
    done = subprocess.run([sys.executable, *command], env=_environ(**more), capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _job(folder: Path, name: str, **more: str) -> list[str]:
    """What the two ranks of the job print."""
    ranks = [
        subprocess.Popen(
            [sys.executable, str(JOB), str(folder / f"rendezvous-{name}")],
            env=_environ(RANK=str(rank), WORLD_SIZE="2", **more),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=300) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said[0][1] + said[1][1]
    return [out for out, _ in said]


def _rings(folder: Path) -> list[Flight]:
    flights = [read_flight(path) for path in folder.iterdir()]
    return sorted(flights, key=lambda seen: seen.words[flight.RANK])


@pytest.mark.e2e
def test_training_is_the_same_bit_for_bit_and_every_collective_is_seen(tmp_path: Path) -> None:
    rings = tmp_path / "rings"
    bare = _job(tmp_path, "bare", EROICA="0", EROICA_RING_DIR=str(rings))
    assert not rings.exists()
    assert _job(tmp_path, "armed", EROICA_RING_DIR=str(rings)) == bare
    # One file each: the workers of their loaders leave none.
    seen = _rings(rings)
    assert [ring.words[flight.RANK] for ring in seen] == [0, 1]
    assert all(ring.words[flight.STATE] == flight.ENDED and ring.num_torn == 0 for ring in seen)
    # Five trainings of three steps; each epoch ends with a next that finds nothing.
    assert [(ring.words[flight.NUM_STEPS], ring.words[flight.NUM_NEXTS]) for ring in seen] == [(15, 20)] * 2
    calls = [
        [(r.group, r.sequence, r.op, r.dtype, r.num_bytes, r.step) for r in ring.records if r.kind == COLLECTIVE]
        for ring in seen
    ]
    assert calls[0] == calls[1]
    ops = Counter(OPS[op] for _, _, op, *_ in calls[0])
    assert ops.keys() == {
        *("allreduce", "allgather", "allgather_base", "allgather_into_tensor_coalesced"),
        *("reduce_scatter_base", "broadcast", "barrier"),
    }
    assert ops["barrier"] == 1 and ops["reduce_scatter_base"] == 9
    for ring in seen:
        for record in ring.records:
            if record.kind == COLLECTIVE:
                is_unseen = OPS[record.op] == "reduce_scatter_base"
                assert (record.duration_ns is None) == is_unseen == bool(record.flags & flight.UNTIMED)
    (sent,), (received,) = [[r for r in ring.records if r.kind == P2P] for ring in seen]
    assert (OPS[sent.op], sent.peer, sent.num_bytes) == ("send", 1, 12)
    assert (OPS[received.op], received.peer, received.sequence) == ("recv", 0, 1)
    groups = [[note for note in ring.notes if "group" in note] for ring in seen]
    assert groups[0] == groups[1]
    assert [(note["ranks"], note["size"]) for note in groups[0]] == [("0-1", 2), ("0-1", 2)]


@pytest.mark.slow
def test_every_shape_of_loop_leaves_its_string_of_events(tmp_path: Path) -> None:
    rings = tmp_path / "rings"
    environ = _environ(EROICA_RING_DIR=str(rings))
    done = subprocess.run([sys.executable, str(LOOPS), "raise"], env=environ, capture_output=True, text=True)
    assert done.returncode == 1 and "ValueError: the end" in done.stderr
    said = json.loads(done.stdout)
    one_each = "nsnsnsn!"
    assert said["without a rank"] is True
    for name in (
        "first",
        "sgd",
        "two workers",
        "iterable",
        "closure",
        "nested",
        "scaler",
        "compiled",
        "scaler and duck",
    ):
        assert said[name] == one_each, name
    assert said["nested, compiled"] == one_each
    assert said["accumulation"] == "nnsnn!"
    assert said["duck"] == "nnnn!"
    assert said["scaler finds inf"].upper() == one_each.upper() and "S" in said["scaler finds inf"]
    assert said["in backward"] == "nssssnssssnssssn!"
    assert said["two optimizers"] == "nssnssnssn!"
    assert said["step raises"] == "nsns!nsn!"
    assert said["data raise"] == "n!"
    assert said["recompiled"] == {} and said["traced"] == []
    assert said["steps"][0] == said["steps"][1]
    assert said["handler"] == "raised"
    assert said["after a fault"][:3] == [True, True, flight.OFF] and "error" in said["after a fault"][3]
    (ring,) = _rings(rings)  # the loaders' workers left none
    assert (ring.words[flight.RANK], ring.words[flight.WORLD_SIZE]) == (5, 8)


@pytest.mark.full
def test_in_steps_without_records_calls_leave_their_positions_and_their_numbers_go_on(tmp_path: Path) -> None:
    code = """
import sys, time, torch
import torch.distributed as dist
import eroica
from eroica.probe.recorder import RECORDER
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
values = torch.zeros(4)
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
for step in range(7):
    RECORDER.thrift.mask = 3
    for _ in range(3):
        dist.all_reduce(values)
    optimizer.step()
RECORDER.thrift.mask = 0
dist.broadcast(values, 0)
pending = dist.new_group([0])
RECORDER.thrift.mask = 1
dist.barrier(pending)
dist.destroy_process_group()
RECORDER.thrift.look(64, time.monotonic_ns())
RECORDER.thrift.recorded_ns += 10**9
RECORDER.num_steps = 128
RECORDER.look(RECORDER.ring)
"""
    _run("-c", code, str(tmp_path / "rendezvous"), EROICA_RING_DIR=str(tmp_path / "rings"))
    (ring,) = _rings(tmp_path / "rings")
    calls = [record for record in ring.records if record.kind == COLLECTIVE]
    assert [(r.step, r.sequence, r.duration_ns is not None) for r in calls] == [
        *((0, 1, True), (0, 2, True), (0, 3, True), (4, 13, True), (4, 14, True), (4, 15, True), (7, 22, True)),
    ]
    world, pair = ring.positions
    assert (OPS[world.op], world.sequence, world.done, world.num_bytes) == ("broadcast", 22, 22, 16)
    assert (OPS[pair.op], pair.sequence, pair.done) == ("barrier", 1, 0)
    assert pair.begin_ns > world.begin_ns == calls[-1].begin_ns
    assert ring.words[flight.HOOK_NS] >= 10**9 and ring.words[flight.ONE_STEP_IN] > 1


@pytest.mark.slow
def test_a_sparse_gradient_is_recorded_with_the_size_that_all_ranks_agree_on(tmp_path: Path) -> None:
    code = """
import sys, torch
import torch.distributed as dist
import eroica
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
gradient = torch.sparse_coo_tensor([[0, 2]], [1.0, 2.0], (5,), check_invariants=True)
dist.all_reduce(gradient)
print(gradient.to_dense().tolist())
dist.destroy_process_group()
"""
    said = _run("-c", code, str(tmp_path / "rendezvous"), EROICA_RING_DIR=str(tmp_path / "rings"))
    assert said == "[1.0, 0.0, 2.0, 0.0, 0.0]\n"
    (ring,) = _rings(tmp_path / "rings")
    assert ring.words[flight.STATE] == flight.ENDED
    assert [(OPS[r.op], r.num_bytes, r.raised) for r in ring.records if r.kind == COLLECTIVE] == [
        ("allreduce", 20, False)
    ]


def test_no_launcher_nor_tool_nor_test_runner_is_armed_and_a_script_is() -> None:
    code = """
import json, sys
armed = {}
for argv, orig in json.loads(sys.argv[1]):
    sys.argv, sys.orig_argv = argv, ["python", *orig]
    before = list(sys.meta_path)
    import eroica
    armed[" ".join(orig)] = sys.meta_path != before
    sys.meta_path[:] = before
    for name in [name for name in sys.modules if name.startswith("eroica")]:
        del sys.modules[name]
print(json.dumps(armed))
"""
    cases = [
        (["/venv/bin/torchrun", "train.py"], ["/venv/bin/torchrun", "train.py"]),
        (["/venv/bin/eroica", "show"], ["/venv/bin/eroica", "show"]),
        (["/venv/bin/eroica-mcp"], ["/venv/bin/eroica-mcp"]),
        (["/venv/bin/pytest"], ["/venv/bin/pytest"]),
        (["-m", "x"], ["-u", "-m", "torch.distributed.run", "x"]),
        (["-m"], ["-m", "eroica"]),
        (["-m"], ["-m", "my.training"]),
        (["train.py", "-m", "eroica"], ["-u", "train.py", "-m", "eroica"]),
        (["-c"], ["-c", "import eroica"]),
    ]
    armed = json.loads(_run("-c", code, json.dumps(cases)))
    assert [name for name, is_armed in armed.items() if is_armed] == [
        *("-m my.training", "-u train.py -m eroica", "-c import eroica"),
    ]
    armed = json.loads(_run("-c", code, json.dumps(cases), EROICA="0"))
    assert not any(armed.values())


def test_the_finder_hears_of_torch_and_leaves_its_modules_as_they_were(tmp_path: Path) -> None:
    """A stand-in package called torch: late binding is about imports, and the real one takes seconds."""
    package = tmp_path / "torch"
    for name in ("utils", "utils/data", "optim", "amp"):
        (package / name).mkdir(parents=True, exist_ok=True)
        (package / name / "__init__.py").touch()
    (package / "__init__.py").write_text(
        "import torch.optim.optimizer\nHOOKED_EARLY = torch.optim.optimizer.hooks[:]\n"
    )
    (package / "optim" / "optimizer.py").write_text(
        "hooks = []\nregister_optimizer_step_pre_hook = register_optimizer_step_post_hook = hooks.append\n"
    )
    (package / "utils" / "data" / "dataloader.py").write_text("1 / 0\n")
    code = """
import sys
import eroica
import torch
from torch.optim import optimizer
loaders = optimizer.__loader__, torch.__spec__.loader
print(torch.HOOKED_EARLY, len(optimizer.hooks), *(type(loader).__name__ for loader in loaders))
try:
    import torch.utils.data.dataloader
except ZeroDivisionError:
    print("their error stays theirs", "torch.utils.data.dataloader" in sys.modules)
try:
    import torch.amp.grad_scaler
except ModuleNotFoundError as error:
    print(error.name)
"""
    assert _run("-c", code, PYTHONPATH=f"{tmp_path}:{ROOT}").splitlines() == [
        *("[] 2 SourceFileLoader SourceFileLoader", "their error stays theirs False", "torch.amp.grad_scaler"),
    ]


@pytest.mark.parametrize("home", ["fsdp/_fully_shard/_fully_shard", "_composable/fsdp/fully_shard"])
def test_fully_shard_is_found_where_torch_has_it_and_where_it_had_it_up_to_2_5(tmp_path: Path, home: str) -> None:
    path = tmp_path / "torch" / "distributed" / f"{home}.py"
    path.parent.mkdir(parents=True)
    path.write_text("def fully_shard(module): return module\n")
    for package in path.relative_to(tmp_path).parents[:-1]:
        (tmp_path / package / "__init__.py").touch()
    code = f"""
import eroica
from torch.distributed.{home.replace("/", ".")} import fully_shard
from eroica.probe.phases import EVALUATION

class Model:
    training = True

model = fully_shard(Model())
print([known() is model for known in EVALUATION.models])
"""
    assert _run("-c", code, PYTHONPATH=f"{tmp_path}:{ROOT}") == "[True]\n"


def test_the_child_of_a_rank_writes_nothing_and_the_child_of_another_may_become_a_rank(tmp_path: Path) -> None:
    code = """
import gc, os, sys
from eroica.probe.recorder import RECORDER
print(RECORDER.arm() is None, flush=True)
os.environ["RANK"] = "2"
assert RECORDER.arm() is not None
num_callbacks = len(gc.callbacks)
child = os.fork()
if child == 0:
    gc.collect()
    print(RECORDER.ring, RECORDER.arm(), num_callbacks - len(gc.callbacks), flush=True)
    sys.exit()
os.waitpid(child, 0)
gc.collect()
print(len(os.listdir(os.environ["EROICA_RING_DIR"])))
"""
    assert _run("-c", code, EROICA_RING_DIR=str(tmp_path)).split() == ["True", "None", "None", "1", "1"]
    (ring,) = _rings(tmp_path)
    assert ring.words[flight.STATE] == flight.ENDED
    assert [record.kind for record in ring.records] == [flight.GC]
    assert ring.words[flight.NUM_GC] >= 1 and ring.words[flight.GC_NS] > 0


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_ranks_that_multiprocessing_starts_come_to_their_end(tmp_path: Path, method: str) -> None:
    script = tmp_path / "train.py"
    script.write_text("""
import multiprocessing, os, sys
import eroica
from eroica.probe.recorder import RECORDER

def train(rank):
    os.environ["RANK"] = rank
    assert RECORDER.arm() is not None

if __name__ == "__main__":
    ranks = [multiprocessing.get_context(sys.argv[1]).Process(target=train, args=(rank,)) for rank in "01"]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    print(RECORDER.ring)
""")
    assert _run(str(script), method, EROICA_RING_DIR=str(tmp_path / "rings")) == "None\n"
    seen = _rings(tmp_path / "rings")
    assert [(ring.words[flight.RANK], ring.words[flight.STATE]) for ring in seen] == [
        (0, flight.ENDED),
        (1, flight.ENDED),
    ]


def test_an_exception_that_ends_the_process_is_noted(tmp_path: Path) -> None:
    code = "from eroica.probe.recorder import RECORDER; RECORDER.arm(); raise ValueError('no loss')"
    done = subprocess.run(
        [sys.executable, "-c", code], env=_environ(RANK="0", EROICA_RING_DIR=str(tmp_path)), capture_output=True
    )
    assert done.returncode == 1
    (ring,) = _rings(tmp_path)
    assert ring.notes[-1]["exception"] == "ValueError: no loss"
    assert ring.words[flight.STATE] == flight.ENDED


def test_a_folder_that_cannot_be_used_switches_the_probe_off_without_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("EROICA_RING_DIR", str(tmp_path / "file"))
    recorder = Recorder()
    assert recorder.arm() is None and recorder.is_off
    assert recorder.arm() is None


def test_rings_lie_in_a_private_folder_that_the_ranks_of_a_job_share(tmp_path: Path) -> None:
    environ = {"XDG_RUNTIME_DIR": str(tmp_path), "MASTER_ADDR": "a", "MASTER_PORT": "29500"}
    folder = ring_folder(environ, os.getpid())
    assert folder == tmp_path / "eroica" / folder_name(environ, os.getpid())
    assert folder.stat().st_mode & 0o777 == folder.parent.stat().st_mode & 0o777 == 0o700
    assert ring_folder(environ, os.getpid()) == folder != ring_folder(environ, os.getppid())
    assert job_name({"SLURM_JOB_ID": "77", **environ}).startswith("77-")
    assert job_name({"TORCHELASTIC_RUN_ID": "none"}).startswith("job-")
    assert job_name({"TORCHELASTIC_RUN_ID": "../../etc \x1b[31m" + "x" * 99}).startswith("etc-31m")
    by_run = {"TORCHELASTIC_RUN_ID": "r1", **environ}
    assert folder_name(by_run, 1) == folder_name({**by_run, "MASTER_PORT": "1"}, 2) == job_name(by_run)
    named = tmp_path / "a" / "b"
    assert ring_folder({"EROICA_RING_DIR": str(named)}, 1) == named and named.is_dir()


def test_a_folder_that_others_may_write_or_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "eroica").mkdir()
    (tmp_path / "eroica").chmod(0o777)
    with pytest.raises(PermissionError, match="not a private folder"):
        ring_folder({"XDG_RUNTIME_DIR": str(tmp_path)}, 1)
    (tmp_path / "eroica").rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "eroica").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match="not a private folder"):
        ring_folder({"XDG_RUNTIME_DIR": str(tmp_path)}, 1)


def test_old_rings_are_deleted_beyond_a_number(tmp_path: Path) -> None:
    for index in range(5):
        (tmp_path / f"job{index}").mkdir()
        path = tmp_path / f"job{index}" / "rank0-1.ring"
        path.touch()
        os.utime(path, (index, index))
    prune(tmp_path, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job2", "job3", "job4"]
    prune(tmp_path / "absent", 3)


LATE_CALLBACK = """
import atexit, os, threading, time
atexit.register(lambda: print("pending at the end:", RECORDER.pending))
import eroica
import torch, torch.distributed as dist
from eroica.probe.recorder import RECORDER
dist.init_process_group("gloo", init_method="file://" + os.environ["MEETING"], rank=0, world_size=1)
dist.barrier()
dist.destroy_process_group()
RECORDER.pending.add(10**9)  # as if a thread of the group, which is destroyed, were still on its way to tell an end
threading.Thread(target=lambda: (time.sleep(0.3), RECORDER.pending.discard(10**9)), daemon=True).start()
"""


@pytest.mark.full
def test_a_process_does_not_end_before_the_last_callback_of_a_group_that_is_destroyed(tmp_path: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if "RANK" not in name}
    environ |= {"EROICA_RING_DIR": str(tmp_path / "rings"), "MEETING": str(tmp_path / "meeting")}
    done = subprocess.run([sys.executable, "-c", LATE_CALLBACK], env=environ, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "pending at the end: set()\n"), done.stderr


def assert_leaves_the_callback(tmp_path: Path, program: str) -> None:
    environ = {name: value for name, value in os.environ.items() if "RANK" not in name}
    environ |= {"EROICA_RING_DIR": str(tmp_path / "rings"), "MEETING": str(tmp_path / "meeting")}
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "left the callback: [True]\n"), done.stderr


LEAVING_LATE = """
import atexit, os, threading, time
left = []
atexit.register(lambda: print("left the callback:", left))
import eroica
import torch, torch.distributed as dist
from eroica.probe.recorder import RECORDER
dist.init_process_group("gloo", init_method="file://" + os.environ["MEETING"], rank=0, world_size=1)
dist.barrier()
dist.destroy_process_group()

def leave():
    RECORDER.tellers.add(threading.get_native_id())  # as a thread of the group that has told an end
    until = time.thread_time() + 0.3
    while time.thread_time() < until:
        pass
    left.append(True)

threading.Thread(target=leave, daemon=True).start()
"""


@pytest.mark.slow
def test_a_process_does_not_end_before_threads_have_left_their_callbacks(tmp_path: Path) -> None:
    assert_leaves_the_callback(tmp_path, LEAVING_LATE)


LEAVING_LATER = """
import atexit, os, threading, time
left = []
atexit.register(lambda: print("left the callback:", left))
import eroica
import torch, torch.distributed as dist
from eroica.probe import recorder
from eroica.probe.recorder import RECORDER
dist.init_process_group("gloo", init_method="file://" + os.environ["MEETING"], rank=0, world_size=1)
dist.barrier()
recorder.LAST_CALLBACKS_NS = 1_500_000_000
RECORDER.pending.add(10**9)  # an operation of a group that is there still, which takes longer than that

def leave():
    time.sleep(2)
    RECORDER.tellers.add(threading.get_native_id())
    RECORDER.pending.discard(10**9)
    until = time.thread_time() + 0.2
    while time.thread_time() < until:
        pass
    left.append(True)

threading.Thread(target=leave, daemon=True).start()
"""


@pytest.mark.full
def test_threads_have_time_to_leave_their_callbacks_however_long_the_last_one_took(tmp_path: Path) -> None:
    assert_leaves_the_callback(tmp_path, LEAVING_LATER)

"""Phases and options: what a rank's ring says of saving, evaluating, compiling and leaving, in real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from eroica.probe.environment import merged
from eroica.ring import PHASE, PHASES, Flight, read_flight

ROOT = Path(__file__).parent.parent

BEGIN = """
import io, os, sys, torch
import torch.distributed as dist
from torch import save            # by name, before eroica
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
import eroica
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/rendezvous", rank=0, world_size=1)
model = torch.nn.Linear(4, 4)
data = torch.randn(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def train(model):
    model.train()
    for x in DataLoader(data, batch_size=2, drop_last=True):
        model(x).sum().backward()
        optimizer.step()
"""


def _ring(folder: Path, code: str) -> tuple[Flight, str]:
    environ = {name: value for name, value in os.environ.items() if name[:6] != "EROICA"}
    environ |= {"PYTHONPATH": str(ROOT), "RANK": "0", "WORLD_SIZE": "1", "EROICA_RING_DIR": str(folder / "rings")}
    environ |= {"NCCL_ALGO": "Ring", "TORCH_AUTH_TOKEN": "hunter2", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + code, str(folder)], env=environ, capture_output=True, text=True, cwd=folder
    )
    assert done.returncode == 0, done.stderr
    (path,) = (folder / "rings").glob("*.ring")
    return read_flight(path), done.stdout


def _phases(flight: Flight) -> list[tuple[str, int, int, str]]:
    return [
        (
            PHASES[record.op],
            record.sequence,
            record.step,
            "open" if record.duration_ns is None else "raised" if record.raised else "over",
        )
        for record in flight.records
        if record.kind == PHASE
    ]


@pytest.mark.full
def test_saving_evaluating_compiling_and_leaving_are_phases_and_exceptions_pass(tmp_path: Path) -> None:
    code = """
import torch.distributed.checkpoint as checkpoint
model = DistributedDataParallel(model)
teacher = torch.nn.Linear(4, 4)
for epoch in range(2):
    train(model)
    teacher.eval()
    model.module.eval()           # as trainers do that keep the bare model
    for x in DataLoader(data, batch_size=2):
        model(x)
save(model.state_dict(), io.BytesIO())
try:
    torch.load("absent")
except FileNotFoundError as error:
    print(error.filename)
checkpoint.save(model.state_dict(), checkpoint_id=sys.argv[1] + "/saved")
torch._dynamo.reset()             # drops everybody's callbacks
torch.compile(model, backend="eager")(data)
dist.destroy_process_group(dist.new_group([0]))
dist.destroy_process_group()
"""
    flight, said = _ring(tmp_path, code)
    assert said == "absent\n"
    phases = _phases(flight)
    assert phases[:5] == [
        ("rendezvous", 1, 0, "over"),
        ("evaluation", 1, 2, "over"),
        ("evaluation", 2, 4, "over"),
        ("save", 1, 4, "over"),
        ("load", 1, 4, "raised"),
    ]
    saved = [phase for phase in phases[5:] if phase[0] == "save"]
    assert len(saved) >= 2 and all(phase[3] == "over" for phase in saved)  # torch.save inside of checkpoint.save
    assert ("compile", 1, 4, "over") in phases
    assert phases[-3:] == [("rendezvous", 2, 4, "over"), ("teardown", 1, 4, "over"), ("teardown", 2, 4, "over")]
    (leaving,) = [note for note in flight.notes if "leaving" in note]  # of a group alone is no leaving
    last = flight.records[-1]
    assert isinstance(leaving["clock_ns"], int) and leaving["clock_ns"] >= last.begin_ns
    assert PHASES[last.op] == "teardown"


@pytest.mark.slow
def test_the_environment_is_noted_at_the_first_step_with_options_and_without_secrets(tmp_path: Path) -> None:
    code = """
import gc, time
from eroica.probe import environment
from eroica.probe.recorder import RECORDER
gc.set_threshold(900, 5, 5)
parallel = DistributedDataParallel(model, bucket_cap_mb=1, gradient_as_bucket_view=True)
train(parallel)
for x in DataLoader(data, batch_size=4):
    pass
gc.disable()
RECORDER.environment.look(RECORDER.ring, time.monotonic_ns())                            # too soon
RECORDER.environment.look(RECORDER.ring, time.monotonic_ns() + environment.LOOK_AGAIN_NS)
dist.destroy_process_group()
"""
    flight, _ = _ring(tmp_path, code)
    notes = [note for note in flight.notes if "environment" in note]
    assert len(notes) == 3 and notes[2] == {"environment": {"gc.enabled": False}}
    found = merged(notes)
    assert found["gc.thresholds"] == "900 5 5" and found["torch.threads"] == 1 and found["env.NCCL_ALGO"] == "Ring"
    assert (found["ddp.1.bucket_bytes_cap"], found["ddp.1.gradient_as_bucket_view"]) == (1 << 20, True)
    assert (found["loader.1.batch_size"], found["loader.1.drop_last"], found["loader.1.num_workers"]) == (2, True, 0)
    assert (found["loader.2.batch_size"], found["loader.2.drop_last"]) == (4, False)
    assert "hunter2" not in json.dumps(flight.notes) and "PYTHONPATH" not in json.dumps(flight.notes)
    assert [record.step for record in flight.records if record.kind == PHASE] == [0, 2]


@pytest.mark.slow
def test_a_loop_that_trains_in_evaluation_mode_is_not_in_evaluation(tmp_path: Path) -> None:
    code = """
model = DistributedDataParallel(model)
train(model)
model.train = lambda mode=True: torch.nn.Module.train(model, False)
train(model)
train(model)
dist.destroy_process_group()
"""
    flight, _ = _ring(tmp_path, code)
    assert [phase for phase in _phases(flight) if phase[0] == "evaluation"] == [("evaluation", 1, 2, "over")]


@pytest.mark.full
def test_what_the_compiler_could_trace_as_one_graph_it_still_can(tmp_path: Path) -> None:
    code = """
optimizer.step()

@torch.compile(backend="eager", fullgraph=True)
def evaluated(x):
    model.eval()
    result = model(x)
    model.train()
    dist.all_reduce(result)
    return result

print(evaluated(data).shape, dict(torch._dynamo.utils.counters["graph_break"]))
scripted = torch.jit.script(torch.nn.Linear(4, 4))
scripted.eval()
dist.destroy_process_group()
"""
    _, said = _ring(tmp_path, code)
    assert said == "torch.Size([4, 4]) {}\n"


@pytest.mark.full
def test_started_workers_the_jobs_own_profiler_and_anomaly_detection_leave_their_marks(tmp_path: Path) -> None:
    code = """
import torch.profiler
from torch.utils.data import Dataset, Subset

class Clips(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return data[index]

model = DistributedDataParallel(model)
train(model)
for epoch in range(2):
    for x in DataLoader(Subset(Clips(), range(4)), batch_size=2, num_workers=1):
        with torch.autograd.detect_anomaly(check_nan=False):
            model(x).sum().backward()
        optimizer.step()
with torch.profiler.profile(on_trace_ready=lambda profiler: None):
    train(model)
dist.destroy_process_group()
"""
    flight, _ = _ring(tmp_path, code)
    phases = [name for name, *_ in _phases(flight)]
    assert phases.count("workers") == 2 and phases.count("profile") >= 1
    told = merged(flight.notes)
    assert told["loader.2.data"] == "Clips" and str(told["loader.2.data_at"]).startswith("<string>:")
    assert str(told["anomaly.1.at"]).startswith("<string>:") and told["gradients.ddp.num_bytes"] == 80

"""From a real host's counters to a diagnosis: two ranks of CPU work, one of which shares its core."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from eroica.diagnosis import diagnose
from eroica.pattern import stack, summarize
from eroica.samplers import Rank, open_samplers
from eroica.samplers.evidence import counters, samples_for
from eroica.samplers.recorder import Recorder
from eroica.samplers.standout import stand_out
from eroica.trace import read_trace

JOB = Path(__file__).parent / "sampled_job.py"
SPIN = "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nprint(flush=True)\nwhile True: pass"


@pytest.mark.e2e
@pytest.mark.full
def test_a_rank_that_shares_its_core_with_a_busy_process_has_cpu_contention_and_the_process_is_named(
    tmp_path: Path,
) -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("needs two cores")
    # Two of them, so that the rank has a third of its core: a busy machine takes something from the other rank as well.
    spin = [sys.executable, "-c", SPIN, str(cores[1])]
    hogs = [subprocess.Popen(spin, stdout=subprocess.PIPE) for _ in range(2)]
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        assert all(hog.stdout is not None and hog.stdout.readline() for hog in hogs)
        for rank in range(2):
            environ = {**os.environ, "RANK": str(rank), "OMP_NUM_THREADS": "1", "EROICA": "0"}
            command = [sys.executable, str(JOB), str(tmp_path), str(cores[rank])]
            ranks.append(subprocess.Popen(command, env=environ, stderr=subprocess.DEVNULL))
        watched = [Rank(k, process.pid) for k, process in enumerate(ranks)]
        samplers, _ = open_samplers()
        recorder = Recorder(samplers)
        recorder.hurry(600)
        pause = threading.Event()
        while any(process.poll() is None for process in ranks):
            pause.wait(recorder.tick(watched))
        assert [process.returncode for process in ranks] == [0, 0]
    finally:
        for process in (*hogs, *ranks):
            process.kill()
            process.wait()
        for hog in hogs:
            if hog.stdout is not None:
                hog.stdout.close()
    assert not recorder.lost
    traces = [read_trace(tmp_path / f"rank{k}.json") for k in range(2)]
    start_ns, end_ns = int(traces[1].ts_ns[0]), int((traces[1].ts_ns + traces[1].dur_ns).max())
    summaries = [
        summarize(trace, samples_for(recorder, rank, start_ns, end_ns))
        for trace, rank in zip(traces, watched, strict=True)
    ]
    diagnosis = diagnose(stack(summaries))
    assert (diagnosis.verdict.ranks, diagnosis.verdict.cause) == ("1", "cpu_contention"), diagnosis.verdict
    told = stand_out({"here": counters(recorder, start_ns, end_ns)})
    waiting = [one for one in told if one.name == "runqueue_ratio" and one.rank == 1]
    assert waiting and waiting[0].value > 0.3
    for hog in hogs:
        assert [one for one in told if f"(pid {hog.pid})" in one.text and "rank 1 may run" in one.text], told

"""What /proc tells of real processes."""

from __future__ import annotations

import os
import subprocess
import sys

from eroica.processes import num_switches, ranks_beside


def test_a_rank_that_has_left_nothing_is_found_beside_one_that_has() -> None:
    loop = "import sys; sys.stdin.read()"
    shell = ["/bin/sh", "-c", f"{sys.executable} -c '{loop}'; true"]
    plain = [sys.executable, "-c", loop]
    ranks = [
        subprocess.Popen(command, env={**os.environ, "RANK": str(rank)}, stdin=subprocess.PIPE)
        for rank, command in enumerate((plain, plain, shell))
    ]
    try:
        found = ranks_beside(ranks[0].pid, {1, 2, 3})
        while found.get(2) in (None, ranks[2].pid):  # until the shell has started its program
            found = ranks_beside(ranks[0].pid, {1, 2, 3})
        assert found[1] == ranks[1].pid and found.keys() == {1, 2}
    finally:
        for rank in ranks:
            rank.communicate(b"")


def test_a_thread_that_runs_is_told_from_one_that_waits() -> None:
    talker = subprocess.Popen(
        [sys.executable, "-c", "while True: print(input(), flush=True)"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    assert talker.stdin is not None and talker.stdout is not None
    talker.stdin.write(b"x\n")
    talker.stdin.flush()
    talker.stdout.readline()
    before = num_switches(talker.pid)
    talker.stdin.write(b"x\n")
    talker.stdin.flush()
    talker.stdout.readline()
    after = num_switches(talker.pid)
    assert before is not None and after is not None and after > before
    talker.communicate()
    assert num_switches(talker.pid) is None

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from eroica.samplers import Missing, Rank, Reading, Target
from eroica.samplers.cgroup import parse_mounts
from eroica.samplers.host import Host, open_sampler
from eroica.samplers.proc import parse_cores, parse_stat, read_text

RECORDED = Path(__file__).parent / "data" / "samplers" / "host_v1"
SECOND = 1_000_000_000
APART = 2_161_140_358
"""Nanoseconds between the two recorded trees."""
TRAINING, CHILD, HOG = 16799, 16802, 16803


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def opened(root: Path) -> Host:
    found = open_sampler(root)
    assert isinstance(found, Host)
    return found


def two_recorded(tmp_path: Path) -> tuple[Reading, Reading]:
    """Both recorded instants, read by one sampler: a link that is turned from the one to the other."""
    link = tmp_path / "root"
    link.symlink_to(RECORDED / "first")
    host = opened(link)
    first = host.read(SECOND, [Rank(0, TRAINING)])
    link.unlink()
    link.symlink_to(RECORDED / "second")
    return first, host.read(SECOND + APART, [Rank(0, TRAINING)])


def of(reading: Reading, kind: str, name: str) -> dict[str, float]:
    return next(dict(values) for target, values in reading.values.items() if (target.kind, target.name) == (kind, name))


def test_a_training_thread_that_shares_its_core_spends_its_time_waiting_for_one(tmp_path: Path) -> None:
    first, second = (of(reading, "rank", "0") for reading in two_recorded(tmp_path))
    ran, waited = (second[name] - first[name] for name in ("driving_cpu_ns", "driving_wait_ns"))
    assert 0 < ran < 0.5 * APART and waited > ran


def test_the_autograd_thread_counts_as_driving_from_the_moment_it_is_found(tmp_path: Path) -> None:
    first, second = (of(reading, "rank", "0") for reading in two_recorded(tmp_path))
    assert first["driving_cpu_ns"] == 0
    alone = [
        int(read_text(RECORDED / which / f"proc/{TRAINING}/task/{TRAINING}/schedstat").split()[0])
        for which in ("first", "second")
    ]
    assert second["driving_cpu_ns"] > alone[1] - alone[0]


def test_a_busy_thread_beside_is_followed_by_name(tmp_path: Path) -> None:
    _, second = two_recorded(tmp_path)
    threads = [target for target in second.values if target.kind == "thread"]
    assert [target.name.split()[0] for target in threads] == ["0/pt_data_pin"]


def test_a_process_outside_of_the_job_is_a_hog_and_a_child_is_not(tmp_path: Path) -> None:
    first, second = two_recorded(tmp_path)
    assert not [target for target in first.values if target.kind == "process"]
    hogs = [target for target in second.values if target.kind == "process"]
    assert hogs == [Target("process", str(HOG), None, HOG)]
    assert second.labels[hogs[0]] == {"name": "python other.py", "cpus": "1"}
    assert 0.1 < of(second, "rank", "0")["children_cpu"] < 1
    assert f"pid {CHILD}" in second.labels[Target("rank", "0", 0, TRAINING)]["children"]


def test_a_rank_without_children_uses_nothing_by_them_once_all_processes_were_seen(tmp_path: Path) -> None:
    files = {f"proc/{pid}/stat": read_text(RECORDED / f"first/proc/{HOG}/stat") for pid in range(1, 60)}
    host = opened(write(tmp_path, {"proc/stat": "cpu  1 0 0 0 0 0 0 0\n", **files}))
    first, second = (of(host.read(k * SECOND, [Rank(0, 7)]), "rank", "0") for k in (1, 2))
    assert "children_cpu" not in first and second["children_cpu"] == 0


def test_a_recorded_host_tells_its_pressure_disk_and_cards(tmp_path: Path) -> None:
    first, _ = two_recorded(tmp_path)
    host = of(first, "host", "")
    assert host["num_cores"] == 2 and host["busy_ticks"] > 0 and host["cpu_pressure_us"] > 0
    assert 0 < host["memory_available_ratio"] < 1 and host["tcp_sent"] > 0
    assert {t.name for t in first.values if t.kind == "disk"} == {"vda"}
    assert {t.name for t in first.values if t.kind == "nic"} == {"lo", "eth0"}
    assert "speed_gbps" not in of(first, "nic", "eth0"), "a virtual card tells -1"
    rank = first.labels[Target("rank", "0", 0, TRAINING)]
    assert rank["cpus"] == "1" and rank["state"] == "R" and rank["pid"] == str(TRAINING)


def test_what_cannot_be_read_is_absent_and_not_zero(tmp_path: Path) -> None:
    stat = read_text(RECORDED / "first" / f"proc/{TRAINING}/stat")
    root = write(tmp_path, {"proc/stat": "cpu 1 0 0 0\ncpu0 1 0 0 0\n", f"proc/{TRAINING}/stat": stat})
    reading = opened(root).read(SECOND, [Rank(0, TRAINING), Rank(1, 4711)])
    assert set(of(reading, "rank", "0")) == {
        "process_cpu_ns",
        "minor_faults",
        "major_faults",
        "stopped_ratio",
        "children_cpu",
    }
    assert not [target for target in reading.values if target.rank == 1], "its process has ended"


def test_a_name_with_spaces_and_parentheses_moves_no_field() -> None:
    plain = read_text(RECORDED / "first" / f"proc/{TRAINING}/stat")
    odd = plain.replace("(python)", "(a) R 1 (b c)")
    told, expected = parse_stat(odd), parse_stat(plain)
    assert told is not None and expected is not None
    assert told.name == "a) R 1 (b c" and told.cpu_ticks == expected.cpu_ticks and told.parent == expected.parent
    assert parse_stat("") is None and parse_stat("1 (x) R 1") is None


def test_throttling_of_version_2_is_summed_over_the_groups_above(tmp_path: Path) -> None:
    pid = 7
    root = write(
        tmp_path,
        {
            "proc/stat": "cpu  1 0 0 0 0 0 0 0\ncpu0 1 0 0 0 0 0 0 0\n",
            "proc/self/mountinfo": "30 23 0:27 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate\n",
            f"proc/{pid}/stat": read_text(RECORDED / "first" / f"proc/{TRAINING}/stat"),
            f"proc/{pid}/cgroup": "0::/pods/pod1\n",
            "sys/fs/cgroup/pods/pod1/cpu.stat": (
                "usage_usec 9\nuser_usec 5\nsystem_usec 4\nnr_periods 10\nnr_throttled 4\nthrottled_usec 250000\n"
            ),
            "sys/fs/cgroup/pods/pod1/cpu.max": "400000 100000\n",
            "sys/fs/cgroup/pods/cpu.stat": "usage_usec 9\nnr_periods 10\nnr_throttled 1\nthrottled_usec 1000\n",
            "sys/fs/cgroup/pods/cpu.max": "max 100000\n",
            "sys/fs/cgroup/pods/pod1/memory.events": "low 0\nhigh 2\nmax 3\noom 1\noom_kill 1\noom_group_kill 0\n",
            "sys/fs/cgroup/pods/pod1/memory.current": "900\n",
            "sys/fs/cgroup/pods/pod1/memory.max": "1000\n",
            "sys/fs/cgroup/pods/pod1/memory.stat": "anon 500\ninactive_file 400\n",
        },
    )
    rank = of(opened(root).read(SECOND, [Rank(3, pid)]), "rank", "3")
    assert rank["num_throttled"] == 5 and rank["throttled_ns"] == 251_000_000 and rank["quota_cores"] == 4
    assert rank["num_at_limit"] == 5 and rank["num_oom_kills"] == 1
    assert rank["memory_ratio"] == 0.5, "the cache that the kernel would drop is no use"


def test_throttling_of_version_1_is_found_beside_a_bare_version_2(tmp_path: Path) -> None:
    pid = 7
    root = write(
        tmp_path,
        {
            "proc/stat": "cpu  1 0 0 0 0 0 0 0\n",
            "proc/self/mountinfo": (
                "31 23 0:28 /docker/abc /sys/fs/cgroup/cpu,cpuacct ro - cgroup cgroup rw,cpu,cpuacct\n"
                "32 23 0:29 / /sys/fs/cgroup/unified ro - cgroup2 cgroup2 rw\n"
            ),
            f"proc/{pid}/stat": read_text(RECORDED / "first" / f"proc/{TRAINING}/stat"),
            f"proc/{pid}/cgroup": "4:cpu,cpuacct:/docker/abc\n0::/docker/abc\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.stat": "nr_periods 9\nnr_throttled 3\nthrottled_time 77000000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "150000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        },
    )
    rank = of(opened(root).read(SECOND, [Rank(0, pid)]), "rank", "0")
    assert rank["num_throttled"] == 3 and rank["throttled_ns"] == 77_000_000 and rank["quota_cores"] == 1.5
    assert "memory_ratio" not in rank


def test_mounts_are_told_with_their_version() -> None:
    mounts = parse_mounts(read_text(RECORDED / "first/proc/self/mountinfo"))
    assert {m.version for m in mounts} == {1, 2}
    assert [m.at for m in mounts if "memory" in m.options] == ["/sys/fs/cgroup/memory"]


def test_cores_are_read_from_ranges() -> None:
    assert parse_cores("0-3,8") == {0, 1, 2, 3, 8} and parse_cores("") == frozenset() and parse_cores("x,2") == {2}
    assert parse_cores("\u00b2,2,3-\u00b3") == {2}


def test_ranks_of_another_network_namespace_have_cards_of_their_own(tmp_path: Path) -> None:
    pid = 7
    header = "Inter-|\n face |\n"
    card = "eth0: {} 1 0 0 0 0 0 0 5 1 0 0 0 0 0 0\n"
    root = write(
        tmp_path,
        {
            "proc/stat": "cpu  1 0 0 0 0 0 0 0\n",
            "proc/net/dev": header + card.format(1),
            f"proc/{pid}/stat": read_text(RECORDED / "first" / f"proc/{TRAINING}/stat"),
            f"proc/{pid}/net/dev": header + card.format(1000),
            "proc/self/ns/x": "",
            f"proc/{pid}/ns/x": "",
        },
    )
    (root / "proc/self/ns/net").symlink_to("net:[1]")
    (root / f"proc/{pid}/ns/net").symlink_to("net:[2]")
    reading = opened(root).read(SECOND, [Rank(2, pid)])
    assert of(reading, "nic", "eth0")["rx_bytes"] == 1 and of(reading, "nic", "2/eth0")["rx_bytes"] == 1000


def test_a_folder_without_proc_says_why_it_cannot_be_sampled(tmp_path: Path) -> None:
    found = open_sampler(tmp_path)
    assert isinstance(found, Missing) and "proc" in found.reason


@pytest.mark.skipif(not os.path.exists("/proc/self/schedstat"), reason="needs Linux with scheduler statistics")
def test_a_real_process_is_read_while_it_runs_and_gone_after_it_ends() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    host = opened(Path("/"))
    alive = host.read(SECOND, [Rank(5, process.pid)])
    os.kill(process.pid, signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    stopped = host.read(SECOND, [Rank(5, process.pid)])
    assert (of(alive, "rank", "5")["stopped_ratio"], of(stopped, "rank", "5")["stopped_ratio"]) == (0, 1)
    os.kill(process.pid, signal.SIGCONT)
    process.communicate(b"\n")
    ended = host.read(2 * SECOND, [Rank(5, process.pid)])
    assert of(alive, "rank", "5")["resident_bytes"] > 0 and of(alive, "rank", "5")["tracer_pid"] == 0
    assert not [target for target in ended.values if target.kind == "rank"]

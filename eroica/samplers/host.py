"""The host's own counters: what the ranks get of its cores, memory, disks and network cards, and who else takes them.

Per rank: CPU time of the process and of the threads that drive training, how long these were runnable and got no core
(run-queue delay), context switches, faults, IO, control group limits. Per host: pressure, stolen time, swap, disks,
network cards. And processes that are not of the job and burn CPU. One read of a host of eight ranks takes a millisecond
or two (`bench.samplers`); what grows with the host, the list of all processes, is looked at a slice at a time.

/proc is the only source, so nothing here needs rights beyond those of the ranks' user; /proc/PID/io of other users is
absent then. Used through `eroica.samplers`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from eroica.samplers import Metric, Missing, Rank, Reading, Target
from eroica.samplers.cgroup import Groups, Mount, cpu_counts, groups_of, memory_counts, parse_mounts
from eroica.samplers.proc import (
    numbers_of,
    parse_cpu,
    parse_disks,
    parse_interfaces,
    parse_pressure,
    parse_schedstat,
    parse_snmp,
    parse_stat,
    read_number,
    read_text,
    words_of,
)
from eroica.samplers.processes import Processes
from eroica.samplers.work import work_ns

SLOW_NS = 1_000_000_000
"""What changes slowly (threads, memory limits, link speeds) is read once in so long."""
DRIVING = "pt_autograd"
"""Threads of this name run backward on device jobs while the main thread waits: together they drive training."""
BUSY_THREADS = 4
"""Other threads of a rank that are followed: those that used most CPU since the last look."""
LOOKS = 1
"""Ranks whose threads are listed in one read: each thread costs a file, and there may be a hundred per rank."""
MOST_THREADS = 256
"""Threads of a rank that are looked at."""
MOST_INTERFACES = 64
BYTES_PER_GBIT = 1e9 / 8

METRICS: Mapping[str, Metric] = {
    # rank
    "driving_cpu_ns": Metric("s/s", True, "cpu_ratio", 1e9),
    "driving_wait_ns": Metric("s/s", True, "runqueue_ratio", 1e9),
    "process_cpu_ns": Metric("cores", True, "process_cpu", 1e9),
    "voluntary_switches": Metric("1/s", True, "voluntary_switches_per_s"),
    "involuntary_switches": Metric("1/s", True, "involuntary_switches_per_s"),
    "minor_faults": Metric("1/s", True, "minor_faults_per_s"),
    "major_faults": Metric("1/s", True, "major_faults_per_s"),
    "file_read_bytes": Metric("MB/s", True, "file_read_mbps", 1e6),
    "file_write_bytes": Metric("MB/s", True, "file_write_mbps", 1e6),
    "throttled_ns": Metric("s/s", True, "throttled_ratio", 1e9),
    "num_throttled": Metric("", True),
    "quota_cores": Metric("cores"),
    "num_at_limit": Metric("", True),
    "num_oom_kills": Metric("", True),
    "memory_ratio": Metric(""),
    "resident_bytes": Metric("B"),
    "swap_bytes": Metric("B"),
    "num_threads": Metric(""),
    "tracer_pid": Metric("", over="max"),
    "stopped_ratio": Metric("", over="mean"),
    "children_cpu": Metric("cores"),
    # thread
    "cpu_ns": Metric("s/s", True, "cpu_ratio", 1e9),
    "wait_ns": Metric("s/s", True, "runqueue_ratio", 1e9),
    # process
    "cpu": Metric("cores"),
    "processor": Metric(""),
    # host
    "busy_ticks": Metric("cores", True, "busy_cores", 100, has_past=True),
    "steal_ticks": Metric("cores", True, "stolen_cores", 100),
    "iowait_ticks": Metric("cores", True, "iowait_cores", 100),
    "procs_running": Metric(""),
    "num_cores": Metric(""),
    "work_ns": Metric("ns", has_past=True),
    "cpu_pressure_us": Metric("s/s", True, "cpu_pressure", 1e6),
    "memory_pressure_us": Metric("s/s", True, "memory_pressure", 1e6),
    "io_pressure_us": Metric("s/s", True, "io_pressure", 1e6),
    "swapped_pages": Metric("1/s", True, "swapped_pages_per_s"),
    "memory_available_ratio": Metric(""),
    "tcp_retransmits": Metric("", True),
    "tcp_sent": Metric("", True),
    # disk
    "read_bytes": Metric("MB/s", True, "read_mbps", 1e6),
    "write_bytes": Metric("MB/s", True, "write_mbps", 1e6),
    "busy_ms": Metric("s/s", True, "busy_ratio", 1e3),
    "queue_ms": Metric("", True, "queue_length", 1e3),
    # nic
    "rx_bytes": Metric("Gbit/s", True, "rx_gbps", BYTES_PER_GBIT),
    "tx_bytes": Metric("Gbit/s", True, "tx_gbps", BYTES_PER_GBIT),
    "rx_errors": Metric("", True),
    "tx_errors": Metric("", True),
    "rx_drops": Metric("", True),
    "tx_drops": Metric("", True),
    "carrier_changes": Metric("", True),
    "speed_gbps": Metric("Gbit/s"),
}
"""`cpu_ratio`, `runqueue_ratio` of a rank: of the threads that drive training, together. Ticks are hundredths of a
second on every Linux that torch runs on (USER_HZ). `work_ns`: CPU time of a fixed piece of work (`work`)."""

TICK_NS = 10_000_000

_STATUS = {
    "voluntary_ctxt_switches": "voluntary_switches",
    "nonvoluntary_ctxt_switches": "involuntary_switches",
    "TracerPid": "tracer_pid",
    "Threads": "num_threads",
    "VmRSS": "resident_bytes",
    "VmSwap": "swap_bytes",
}
_IO = {"read_bytes": "file_read_bytes", "write_bytes": "file_write_bytes"}


@dataclass
class _Threads:
    """What a rank's driving threads got so far, and which others are followed."""

    pid: int
    driving: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Thread id -> (ran, waited), as last read. A thread that is found later counts from then on."""
    ran_ns: int = 0
    waited_ns: int = 0
    names: dict[int, str] = field(default_factory=dict)
    followed: tuple[int, ...] = ()
    ticks: dict[int, int] = field(default_factory=dict)
    looked_ns: int | None = None


@dataclass
class _Facts:
    """What changes slowly about a rank."""

    groups: Groups
    namespace: str
    memory: dict[str, float]
    read_ns: int


class Host:
    """Reads /proc and /sys under a root folder."""

    def __init__(self, root: Path, tick_ns: int = TICK_NS, work_ns: Callable[[], float] | None = None) -> None:
        """`work_ns`: does a fixed piece of work on this host and says how long that took; None: `root` is another's."""
        self._work_ns = work_ns
        self._proc, self._sys, self._root, self._tick_ns = root / "proc", root / "sys", root, tick_ns
        self._mounts: tuple[Mount, ...] = parse_mounts(read_text(self._proc / "self" / "mountinfo"))
        self._namespace = _link(self._proc / "self" / "ns" / "net")
        self._threads: dict[int, _Threads] = {}
        self._facts: dict[int, _Facts] = {}
        self._processes = Processes(self._proc, tick_ns)
        self._links: dict[str, dict[str, float]] = {}
        self._link_labels: dict[str, dict[str, str]] = {}
        self._links_ns: int | None = None
        self._num_cores = sum(
            line.startswith("cpu") and not line.startswith("cpu ")
            for line in read_text(self._proc / "stat").split("\n")
        )

    @property
    def metrics(self) -> Mapping[str, Metric]:
        """See `METRICS`."""
        return METRICS

    def read(self, now_ns: int, ranks: Sequence[Rank]) -> Reading:
        """All targets of this host. A rank whose process has ended is absent."""
        values: dict[Target, dict[str, float]] = {}
        labels: dict[Target, dict[str, str]] = {}
        live = {rank.pid for rank in ranks}
        for pid in [pid for pid in self._threads if pid not in live]:
            del self._threads[pid]
            self._facts.pop(pid, None)
        self._processes.look(now_ns, live)
        threads = [self._threads.setdefault(rank.pid, _Threads(rank.pid)) for rank in ranks]
        due = [one for one in threads if one.looked_ns is None or now_ns - one.looked_ns >= SLOW_NS]
        for one in sorted(due, key=lambda one: one.looked_ns or 0)[:LOOKS]:
            self._look_at_threads(one)
            one.looked_ns = now_ns
        limits: dict[tuple[Path, ...], dict[str, float]] = {}
        namespaces: dict[str, list[Rank]] = {}
        for rank in ranks:
            target = Target("rank", str(rank.rank), rank.rank, rank.pid)
            found = self._rank(now_ns, rank, limits, labels.setdefault(target, {}))
            if found is None:
                del labels[target]
                continue
            values[target] = found
            values |= self._followed(rank)
            namespaces.setdefault(self._facts[rank.pid].namespace, []).append(rank)
        values[Target("host", "")] = self._host()
        for name, counts in parse_disks(read_text(self._proc / "diskstats")):
            # Partitions have no folder of their own in /sys/block, and loop and memory devices are no disks.
            if not name.startswith(("loop", "ram", "zram")) and (self._sys / "block" / name).is_dir():
                values[Target("disk", name)] = counts
        self._network(now_ns, namespaces, values, labels)
        for hog in self._processes.hogs():
            target = Target("process", str(hog.pid), None, hog.pid)
            values[target] = {"cpu": hog.cores, "processor": float(hog.processor)}
            labels[target] = {"name": hog.name, "cpus": hog.cpus}
        return Reading(values, labels)

    def _rank(
        self, now_ns: int, rank: Rank, limits: dict[tuple[Path, ...], dict[str, float]], labels: dict[str, str]
    ) -> dict[str, float] | None:
        folder = f"{self._proc}/{rank.pid}"
        stat = parse_stat(read_text(f"{folder}/stat"))
        if stat is None or stat.state in "ZX":
            return None
        facts = self._facts_of(now_ns, rank.pid)
        found = self._driving(rank.pid)
        found |= {
            "process_cpu_ns": float(stat.cpu_ticks * self._tick_ns),
            "minor_faults": float(stat.minor_faults),
            "major_faults": float(stat.major_faults),
            "stopped_ratio": float(stat.state in "Tt"),
        }
        status = read_text(f"{folder}/status")
        found |= {_STATUS[key]: value for key, value in numbers_of(status, *_STATUS).items()}
        found |= {_IO[key]: value for key, value in numbers_of(read_text(f"{folder}/io"), *_IO).items()}
        if facts.groups.cpu not in limits:
            limits[facts.groups.cpu] = cpu_counts(facts.groups.cpu)
        found |= limits[facts.groups.cpu] | facts.memory
        children = self._processes.children(rank.pid)
        if children is not None:
            found["children_cpu"] = children.cores
            labels["children"] = children.text
        cpus = words_of(status, "Cpus_allowed_list").get("Cpus_allowed_list", [])
        labels |= {"name": stat.name, "state": stat.state, "cpus": "".join(cpus), "pid": str(rank.pid)}
        return found

    def _facts_of(self, now_ns: int, pid: int) -> _Facts:
        facts = self._facts.get(pid)
        if facts is None or now_ns - facts.read_ns >= SLOW_NS:
            folder = self._proc / str(pid)
            groups = groups_of(self._root, read_text(folder / "cgroup"), self._mounts)
            shared = [f for f in self._facts.values() if f.groups == groups and f.read_ns == now_ns]
            memory = shared[0].memory if shared else memory_counts(groups.memory)
            facts = self._facts[pid] = _Facts(groups, _link(folder / "ns" / "net"), memory, now_ns)
        return facts

    def _driving(self, pid: int) -> dict[str, float]:
        """What the driving threads got, summed since each was first seen, so that a new one makes no jump."""
        threads = self._threads[pid]
        found = False
        for tid in [pid, *(tid for tid, name in threads.names.items() if name.startswith(DRIVING) and tid != pid)]:
            times = parse_schedstat(read_text(f"{self._proc}/{pid}/task/{tid}/schedstat"))
            if times is None:
                continue
            found = True
            before = threads.driving.get(tid, times)
            threads.ran_ns += max(times[0] - before[0], 0)
            threads.waited_ns += max(times[1] - before[1], 0)
            threads.driving[tid] = times
        if found:
            return {"driving_cpu_ns": float(threads.ran_ns), "driving_wait_ns": float(threads.waited_ns)}
        # A kernel without CONFIG_SCHED_INFO: hundredths of a second, and no run-queue delay.
        stat = parse_stat(read_text(self._proc / str(pid) / "task" / str(pid) / "stat"))
        return {} if stat is None else {"driving_cpu_ns": float(stat.cpu_ticks * self._tick_ns)}

    def _look_at_threads(self, threads: _Threads) -> None:
        pid = threads.pid
        folder = self._proc / str(pid) / "task"
        try:
            tids = sorted(int(name) for name in os.listdir(folder) if name.isdigit())[:MOST_THREADS]
        except OSError:
            return
        names: dict[int, str] = {}
        ticks: dict[int, int] = {}
        for tid in tids:
            stat = parse_stat(read_text(f"{folder}/{tid}/stat"))
            if stat is not None:
                names[tid], ticks[tid] = stat.name, stat.cpu_ticks
        # At the first look all of a thread's past counts, which is as good a guess as any.
        rise = {tid: ticks[tid] - threads.ticks.get(tid, 0) for tid in ticks}
        others = [tid for tid in rise if tid != pid and rise[tid] > 0 and not names[tid].startswith(DRIVING)]
        threads.followed = tuple(sorted(others, key=lambda tid: (-rise[tid], tid))[:BUSY_THREADS])
        threads.names, threads.ticks = names, ticks
        threads.driving = {tid: times for tid, times in threads.driving.items() if tid in names}

    def _followed(self, rank: Rank) -> dict[Target, dict[str, float]]:
        found: dict[Target, dict[str, float]] = {}
        threads = self._threads[rank.pid]
        for tid in threads.followed:
            times = parse_schedstat(read_text(f"{self._proc}/{rank.pid}/task/{tid}/schedstat"))
            if times is not None:
                # Threads of one name differ by their id, which people need for `py-spy` and `top -H`.
                name = f"{rank.rank}/{threads.names[tid]} {tid}"
                found[Target("thread", name, rank.rank, tid)] = {"cpu_ns": float(times[0]), "wait_ns": float(times[1])}
        return found

    def _host(self) -> dict[str, float]:
        found: dict[str, float] = {"num_cores": float(self._num_cores)} if self._num_cores else {}
        cpu = parse_cpu(read_text(self._proc / "stat"))
        if "idle" in cpu:
            found["busy_ticks"] = sum(cpu.get(state, 0.0) for state in ("user", "nice", "system", "irq", "softirq"))
        for state in ("steal", "iowait"):
            if state in cpu:
                found[f"{state}_ticks"] = cpu[state]
        if "procs_running" in cpu:
            found["procs_running"] = cpu["procs_running"]
        for resource in ("cpu", "memory", "io"):
            pressure = parse_pressure(read_text(self._proc / "pressure" / resource))
            if "some" in pressure:
                found[f"{resource}_pressure_us"] = pressure["some"]
        vm = numbers_of(read_text(self._proc / "vmstat"), "pswpin", "pswpout", "oom_kill")
        if "pswpin" in vm and "pswpout" in vm:
            found["swapped_pages"] = vm["pswpin"] + vm["pswpout"]
        if "oom_kill" in vm:
            found["num_oom_kills"] = vm["oom_kill"]
        memory = numbers_of(read_text(self._proc / "meminfo"), "MemTotal", "MemAvailable")
        if memory.get("MemTotal") and "MemAvailable" in memory:
            found["memory_available_ratio"] = memory["MemAvailable"] / memory["MemTotal"]
        if self._work_ns is not None:
            found["work_ns"] = self._work_ns()
        return found

    def _network(
        self,
        now_ns: int,
        namespaces: Mapping[str, Sequence[Rank]],
        values: dict[Target, dict[str, float]],
        labels: dict[Target, dict[str, str]],
    ) -> None:
        """The cards of this process's network namespace, and of each other one that a rank lives in."""
        self._network_of(self._proc / "net", None, values)
        for namespace, inside in namespaces.items():
            if namespace and namespace != self._namespace:
                self._network_of(self._proc / str(inside[0].pid) / "net", inside[0], values)
        if self._links_ns is None or now_ns - self._links_ns >= SLOW_NS:
            self._links_ns = now_ns
            self._look_at_links([t.name for t in values if t.kind == "nic" and t.rank is None])
        for target in list(values):
            if target.kind == "nic" and target.rank is None:
                values[target] |= self._links.get(target.name, {})
                labels[target] = self._link_labels.get(target.name, {})

    def _network_of(self, folder: Path, only: Rank | None, values: dict[Target, dict[str, float]]) -> None:
        for name, counts in list(parse_interfaces(read_text(folder / "dev")))[:MOST_INTERFACES]:
            if counts.get("rx_bytes") or counts.get("tx_bytes"):
                target = Target("nic", name) if only is None else Target("nic", f"{only.rank}/{name}", only.rank)
                values[target] = counts
        tcp = parse_snmp(read_text(folder / "snmp"), "Tcp")
        if "RetransSegs" in tcp and "OutSegs" in tcp:
            owner = Target("host", "") if only is None else Target("rank", str(only.rank), only.rank, only.pid)
            values[owner] |= {"tcp_retransmits": tcp["RetransSegs"], "tcp_sent": tcp["OutSegs"]}

    def _look_at_links(self, names: Sequence[str]) -> None:
        self._links.clear()
        self._link_labels.clear()
        for name in names:
            folder = self._sys / "class" / "net" / name
            found: dict[str, float] = {}
            changes, speed = read_number(folder / "carrier_changes"), read_number(folder / "speed")
            if changes is not None:
                found["carrier_changes"] = changes
            if speed is not None and speed > 0:  # -1 on virtual cards
                found["speed_gbps"] = speed / 1000
            self._links[name] = found
            self._link_labels[name] = {"state": read_text(folder / "operstate").strip()}


def _link(path: Path) -> str:
    """Where a symbolic link leads, "" if that cannot be seen."""
    try:
        return os.readlink(path)
    except OSError:
        return ""


def open_sampler(root: Path) -> Host | Missing:
    """A sampler of the host whose /proc and /sys lie under `root`."""
    if not read_text(root / "proc" / "stat").startswith("cpu"):
        return Missing("host", f"{root / 'proc' / 'stat'} cannot be read; host counters need Linux with /proc mounted")
    is_here = root == Path("/")
    ticks = os.sysconf("SC_CLK_TCK") if is_here else 100
    return Host(root, 1_000_000_000 // ticks, work_ns if is_here else None)

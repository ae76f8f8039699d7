"""What is unusual in the counters of all hosts: against peers of the same kind, and against what is never normal.

Each rule names a value and either how far from the median of its peers it must lie (and beyond their own scatter), or a
limit that it must pass, or both at once. Observations are evidence; they carry no cause and no blame, since most of
them are also true of healthy jobs. Pure. Used by whoever fills the context of a diagnosis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from eroica.job import format_ranks
from eroica.samplers.evidence import Counted
from eroica.samplers.proc import parse_cores
from eroica.untrusted import clean

MOST = 40
"""Observations told; the ones that stand out most, by how many times their limit they reach."""
SCATTER = 6.0
"""A value must lie so many robust deviations from its peers, where there are enough of them to tell."""
ENOUGH_PEERS = 4


@dataclass(frozen=True, slots=True)
class Observation:
    """A number that stands out."""

    host: str
    target: str
    """"rank 3", "nic eth0", "device 2", "process 4711", "host"."""
    rank: int | None
    name: str
    """Of the value, as in `counters`."""
    value: float
    peers: float | None
    """Median of the others of its kind; None where there are none, or where they do not matter."""
    text: str
    """One sentence with the numbers; names from the job are cleaned."""
    strength: float
    """Value, or its distance to peers, over the least that counts: to order them, 1 at least."""


@dataclass(frozen=True, slots=True)
class SharedCores:
    """Ranks of one host that may run on the same cores, directly or by way of each other."""

    host: str
    ranks: tuple[int, ...]
    num_cores: int
    strangers: float
    """Cores that programs which are not of the job use among these, and on no others."""


def _share(value: float) -> str:
    return f"{value:.0%}"


def _whole(value: float) -> str:
    return f"{value:.0f}"


def _plain(value: float) -> str:
    return f"{value:.3g}"


@dataclass(frozen=True, slots=True)
class _Rule:
    kind: str
    name: str
    words: str
    """A sentence with TARGET and VALUE in it."""
    show: Callable[[float], str]
    """How a value is written."""
    limit: float | None = None
    """Beyond this it stands out by itself."""
    apart: float | None = None
    """Farther from its peers than this it stands out."""
    low: bool = False
    """Small values are the bad ones."""


WORKERS_FILL = "worker_cores"
SLOW_CORES = 1.15
"""Times the usual CPU time for fixed work. Beside jobs of all kinds that keep two cores busy, nine of ten readings were
within 9 % of the middle."""
BUSIER = 0.1
"""Share of the cores by which a host may be busier than it was. Beyond, cores may be slow for what the job does: two
threads of a core slow each other."""

RULES = (
    # Ranks. A training thread hardly ever waits for a core on a host of its own; 5 % is beyond any host we saw idle.
    _Rule("rank", "runqueue_ratio", "TARGET's training thread waited for a core VALUE of the time", _share, 0.05),
    _Rule("rank", "throttled_ratio", "the CPU quota of TARGET's group held it for VALUE s per second", _plain, 0.01),
    _Rule("rank", "process_cpu", "TARGET's process uses VALUE cores", _plain, apart=0.5),
    _Rule("rank", "children_cpu", "processes that TARGET has started use VALUE cores", _plain, apart=0.5),
    _Rule("rank", "major_faults_per_s", "TARGET reads VALUE pages per second back from disk", _plain, 20.0),
    _Rule("rank", "num_at_limit", "the memory limit of TARGET's control group was reached VALUE times", _plain, 1.0),
    _Rule("rank", "num_oom_kills", "the kernel killed VALUE processes of TARGET's group for memory", _plain, 1.0),
    _Rule("rank", "memory_ratio", "the control group of TARGET uses VALUE of its memory limit", _share, 0.95),
    _Rule("rank", "swap_bytes", "TARGET has VALUE bytes in swap", _plain, 64e6),
    _Rule("rank", "tracer_pid", "process VALUE traces TARGET: a debugger or stack sampler", _whole, 1.0),
    _Rule("rank", "stopped_ratio", "TARGET was found stopped VALUE of the time, by signals or a tracer", _share, 0.01),
    _Rule("rank", "file_read_mbps", "TARGET reads VALUE MB/s from disks", _plain, 2.0),
    _Rule("rank", "file_write_mbps", "TARGET writes VALUE MB/s to disks", _plain, apart=50.0),
    _Rule("rank", "retransmit_ratio", "VALUE of TARGET's TCP segments were sent again", _share, 0.01),
    # Hosts.
    _Rule("host", "stolen_share", "the hypervisor gives VALUE of this host's cores to others", _share, 0.05),
    _Rule("host", "busy_share", "this host's cores are busy VALUE of the time", _share, 0.9),
    _Rule("host", "slow_cores", "fixed work on this host takes VALUE times its usual CPU time", _plain, SLOW_CORES),
    _Rule("host", "lately_slow_cores", "fixed work here has taken VALUE times its usual CPU time", _plain, SLOW_CORES),
    _Rule("host", "runnable_per_core", "VALUE threads per core want to run on this host", _plain, 2.0),
    _Rule("host", "memory_pressure", "some process here waits for memory VALUE of the time", _share, 0.05),
    _Rule("host", "io_pressure", "some process here waits for disks VALUE of the time", _share, 0.4, 0.3),
    _Rule("host", "swapped_pages_per_s", "this host swaps VALUE pages per second", _plain, 100.0),
    _Rule("host", "memory_available_ratio", "this host has VALUE of its memory left", _share, 0.05, low=True),
    _Rule("host", "num_oom_kills", "the kernel killed VALUE processes of this host for want of memory", _plain, 1.0),
    _Rule("host", "retransmit_ratio", "VALUE of this host's TCP segments were sent again", _share, 0.01),
    _Rule("disk", "busy_ratio", "TARGET is busy VALUE of the time", _share, 0.9),
    # Links.
    _Rule("nic", "rx_errors", "TARGET received VALUE broken packets", _plain, 1.0),
    _Rule("nic", "tx_errors", "TARGET failed to send VALUE packets", _plain, 1.0),
    _Rule("nic", "rx_drops", "TARGET dropped VALUE packets that it received", _plain, 10.0),
    _Rule("nic", "tx_drops", "TARGET dropped VALUE packets before sending", _plain, 10.0),
    _Rule("nic", "carrier_changes", "TARGET lost or found its carrier VALUE times", _plain, 1.0),
    _Rule("nic", "speed_gbps", "TARGET runs at VALUE Gbit/s", _plain, apart=0.5, low=True),
    _Rule("nic", "used_share", "TARGET carries VALUE of its speed", _share, 0.9),
    _Rule("port", "port_speed_gbps", "TARGET runs at VALUE Gbit/s", _plain, apart=1.0, low=True),
    _Rule("port", "port_active", "TARGET is not active", _plain, 0.5, low=True),
    *(
        _Rule("port", name, f"TARGET counted VALUE more of {name}", _plain, 1.0)
        for name in ("symbol_error", "link_downed", "link_error_recovery", "port_rcv_errors", "port_xmit_discards")
    ),
    # Marks and repeats are normal on busy fabrics: only those of one port against the others tell.
    *(
        _Rule("port", f"{name}_per_s", f"TARGET counts VALUE of {name} per second", _plain, apart=100.0)
        for name in ("np_cnp_sent", "rp_cnp_handled", "out_of_sequence", "packet_seq_err", "local_ack_timeout_err")
    ),
    # Devices. A power cap is active on healthy busy devices: the clock against peers tells, not the flag.
    _Rule("device", "sm_clock_ratio", "TARGET runs at VALUE of its top clock", _share, apart=0.03, low=True),
    *(
        _Rule("device", f"throttle_{name}", f"TARGET's clock was lowered VALUE of the time: {reason}", _share, 0.01)
        for name, reason in (
            ("hw_slowdown", "a hardware slowdown"),
            ("thermal", "its temperature"),
            ("hw_thermal", "its temperature (hardware)"),
            ("power_brake", "an external power brake"),
        )
    ),
    _Rule("device", "temperature_c", "TARGET is at VALUE degrees Celsius", _plain, apart=12.0),
    _Rule("device", "pcie_width_ratio", "TARGET's PCIe link has VALUE of its lanes", _share, 0.99, low=True),
    _Rule("device", "pcie_replays", "TARGET's PCIe link repeated VALUE packets", _plain, 10.0),
    _Rule("device", "num_nvlinks", "TARGET has VALUE NVLinks up", _plain, apart=0.5, low=True),
    _Rule("device", "nvlink_errors", "TARGET's NVLinks counted VALUE errors", _plain, 1.0),
    _Rule("device", "uncorrected_ecc", "TARGET's memory had VALUE errors that could not be corrected", _plain, 1.0),
    _Rule("device", "num_processes", "VALUE processes compute on TARGET", _plain, apart=0.5),
    _Rule("device", "lost", "TARGET does not answer its driver any more", _plain, 0.5),
)  # fmt: skip

THREAD_APART = 0.3
"""Cores by which the threads beside the training thread must exceed the peers' to be told."""
HELPED, HELPS = 0.05, 0.5
"""Share of a host's cores, and of what the training threads use, that threads beside these must use to be told
together: those of process groups and loaders hardly run."""
FULL, MOST_OF_THEM = 0.85, 0.5
"""Share of a host's cores that are busy, and of these cores that processes started by the ranks use, to say that these
leave no core for more."""
IDLE_DEVICE = 0.1
"""A device that is busy for less of the time lowers its clock and cools down by itself: not compared with others."""
HOG_CORES = 0.25
"""A process that is not of the job is told from here on."""


@dataclass(frozen=True, slots=True)
class _Value:
    host: str
    counted: Counted
    value: float


def _target(kind: str, name: str) -> str:
    return clean(f"{kind} {name}".strip())


def _derived(counted: Counted) -> dict[str, float]:
    """The values, and shares made of them."""
    values = dict(counted["values"])

    def share(name: str, part: str, whole: str, least: float = 0.0) -> None:
        if part in values and values.get(whole, 0.0) > 0 and values[part] >= least:
            values[name] = values[part] / values[whole]

    if values.get("busy_ratio", 1.0) < IDLE_DEVICE and counted["kind"] == "device":
        for name in ("sm_clock_ratio", "temperature_c", "num_processes"):
            values.pop(name, None)
    share("stolen_share", "stolen_cores", "num_cores")
    share("busy_share", "busy_cores", "num_cores")
    share("runnable_per_core", "procs_running", "num_cores")
    # Of a handful of segments one is soon a percent.
    share("retransmit_ratio", "tcp_retransmits", "tcp_sent", least=20)
    busier = values.get("busy_cores", 0.0) - values.get("usual_busy_cores", 0.0)
    if busier <= BUSIER * values.get("num_cores", 0.0):
        share("slow_cores", "work_ns", "usual_work_ns")
        share("lately_slow_cores", "lately_work_ns", "usual_work_ns")
    if values.get("speed_gbps"):
        values["used_share"] = max(values.get("rx_gbps", 0.0), values.get("tx_gbps", 0.0)) / values["speed_gbps"]
    return values


def _judge(rule: _Rule, values: Sequence[_Value]) -> Iterator[Observation]:
    numbers = np.array([v.value for v in values])
    for k, one in enumerate(values):
        others = np.delete(numbers, k)
        middle = float(np.median(others)) if len(others) else None
        sign = -1.0 if rule.low else 1.0
        strength, compared = 0.0, False
        if rule.limit is not None and sign * (one.value - rule.limit) >= 0:
            strength = one.value / rule.limit if not rule.low else rule.limit / max(one.value, rule.limit / 100)
        if rule.apart is not None:
            compared = True
            distance = sign * (one.value - middle) if middle is not None else 0.0
            scatter = 1.4826 * float(np.median(np.abs(others - middle))) if middle is not None else 0.0
            far = distance >= rule.apart and (len(others) < ENOUGH_PEERS or distance >= SCATTER * scatter)
            # With a limit as well, both must hold.
            strength = distance / rule.apart if far and (rule.limit is None or strength) else 0.0
        if strength:
            name = _target(one.counted["kind"], one.counted["name"])
            peers = middle if compared or (middle is not None and rule.kind == "rank") else None
            text = rule.words.replace("TARGET", name).replace("VALUE", rule.show(one.value))
            text += "" if peers is None else f" (peers: {rule.show(peers)})"
            reasons = one.counted["labels"].get("reasons", "")
            if rule.name == "sm_clock_ratio" and reasons:
                text += f"; reasons: {clean(reasons)}"
            busiest = one.counted["labels"].get("children", "")
            if rule.name == "children_cpu" and busiest:
                text += f", most of them {clean(busiest)}"
            yield Observation(one.host, name, one.counted["rank"], rule.name, one.value, peers, text, strength)


def _busy_threads(hosts: Mapping[str, Sequence[Counted]]) -> Iterator[Observation]:
    """Threads of a rank beside those that drive training, against the sum of the same on its peers."""
    total: dict[tuple[str, int], float] = {}
    busiest: dict[tuple[str, int], tuple[float, str]] = {}
    for host, every in hosts.items():
        for counted in every:
            rank = counted["rank"]
            if rank is None or counted["kind"] not in ("rank", "thread"):
                continue
            total.setdefault((host, rank), 0.0)
            if counted["kind"] == "thread":
                cores = counted["values"].get("cpu_ratio", 0.0)
                total[host, rank] += cores
                name = counted["name"].partition("/")[2]
                busiest[host, rank] = max(busiest.get((host, rank), (0.0, "")), (cores, name))
    for (host, rank), cores in total.items():
        others = [value for key, value in total.items() if key != (host, rank)]
        middle = float(np.median(others)) if others else 0.0
        if cores - middle >= THREAD_APART:
            name = clean(busiest.get((host, rank), (0.0, ""))[1])
            text = (
                f"threads beside rank {rank}'s training thread use {cores:.2f} cores (peers: {middle:.2f}), "
                f"most of them thread {name}"
            )
            yield Observation(
                host, f"rank {rank}", rank, "thread_cpu", cores, middle, text, (cores - middle) / THREAD_APART
            )


def _hogs(host: str, every: Sequence[Counted]) -> Iterator[Observation]:
    """Processes that are not of the job, and the ranks that may run on the same cores."""
    ranks = [c for c in every if c["kind"] == "rank"]
    for counted in every:
        cores = counted["values"].get("cpu", 0.0)
        if counted["kind"] != "process" or cores < HOG_CORES:
            continue
        theirs = parse_cores(counted["labels"].get("cpus", ""))
        beside = [
            c["rank"] for c in ranks if c["rank"] is not None and theirs & parse_cores(c["labels"].get("cpus", ""))
        ]
        where = f" on cores where rank{'s' if len(beside) > 1 else ''} {format_ranks(beside)} may run" if beside else ""
        what = f"{clean(counted['labels'].get('name', ''))} (pid {counted['name']})"
        text = f"{what}, which is not of the job, uses {cores:.2f} cores{where}"
        yield Observation(host, _target("process", counted["name"]), None, "cpu", cores, None, text, cores / HOG_CORES)


def _placement(host: str, every: Sequence[Counted]) -> Iterator[Observation]:
    """Ranks that share fewer cores than they are; ranks that are stopped."""
    sharing: dict[frozenset[int], list[int]] = {}
    for counted in every:
        rank = counted["rank"]
        if counted["kind"] != "rank" or rank is None:
            continue
        if counted["labels"].get("state", "").startswith(("T", "t")):
            text = f"rank {rank} is stopped (state {clean(counted['labels']['state'])}), by a signal or a tracer"
            yield Observation(host, f"rank {rank}", rank, "state", 1.0, None, text, 100.0)
        cores = parse_cores(counted["labels"].get("cpus", ""))
        if cores:
            sharing.setdefault(cores, []).append(rank)
    for cores, ranks in sharing.items():
        if len(ranks) > len(cores):
            text = f"ranks {format_ranks(ranks)} share {len(cores)} core{'s' if len(cores) > 1 else ''}"
            yield Observation(
                host, "host", None, "ranks_per_core", len(ranks) / len(cores), None, text, len(ranks) / len(cores)
            )


def _helpers(host: str, every: Sequence[Counted]) -> Iterator[Observation]:
    """Threads of the ranks' processes beside the training threads that take much of the host's cores together."""
    cores = next((c["values"].get("num_cores", 0.0) for c in every if c["kind"] == "host"), 0.0)
    told = [c["values"] for c in every if c["kind"] == "rank" and {"process_cpu", "cpu_ratio"} <= c["values"].keys()]
    training = sum(values["cpu_ratio"] for values in told)
    used = sum(max(values["process_cpu"] - values["cpu_ratio"], 0.0) for values in told)
    least = max(HELPED * cores, HELPS * training)
    if cores and used >= least:
        text = (
            f"threads beside the training threads of {len(told)} ranks use {used:.2g} of {cores:.0f} cores, these "
            f"themselves {training:.2g}"
        )
        yield Observation(host, "host", None, "helper_cores", used, None, text, used / least)


def _workers(host: str, every: Sequence[Counted]) -> Iterator[Observation]:
    """Processes that the ranks have started, those of loaders as a rule, fill the cores."""
    of_host = next((c["values"] for c in every if c["kind"] == "host" and c["values"].get("num_cores")), {})
    cores, busy = of_host.get("num_cores", 0.0), of_host.get("busy_cores", 0.0)
    told = [c for c in every if c["kind"] == "rank" and "children_cpu" in c["values"]]
    used = sum(c["values"]["children_cpu"] for c in told)
    if told and busy >= FULL * cores and used >= MOST_OF_THEM * cores > 0:
        busiest = max(told, key=lambda c: c["values"]["children_cpu"])["labels"].get("children", "")
        text = (
            f"processes that {len(told)} ranks have started use {used:.2g} of {cores:.0f} CPU cores, of which "
            f"{busy:.2g} are busy" + (f"; most of them: {clean(busiest)}" if busiest else "")
        )
        yield Observation(host, "host", None, WORKERS_FILL, used, None, text, used / (MOST_OF_THEM * cores))


def _far_devices(host: str, every: Sequence[Counted]) -> Iterator[Observation]:
    """Ranks that may not run on any of the cores that their device is attached to."""
    ranks = {c["labels"]["pid"]: c for c in every if c["kind"] == "rank" and c["labels"].get("pid")}
    for device in every:
        near = parse_cores(device["labels"].get("cpus", ""))
        if device["kind"] != "device" or not near:
            continue
        for pid in device["labels"].get("pids", "").split():
            own = parse_cores(ranks[pid]["labels"].get("cpus", "")) if pid in ranks else frozenset()
            if own and not own & near:
                rank = ranks[pid]["rank"]
                text = (
                    f"rank {rank} is bound to cores {clean(ranks[pid]['labels']['cpus'])}, and its device "
                    f"{clean(device['name'])} is attached to cores {clean(device['labels']['cpus'])}"
                )
                yield Observation(host, f"rank {rank}", rank, "far_device", 1.0, None, text, 2.0)


def shared_cores(hosts: Mapping[str, Sequence[Counted]]) -> tuple[SharedCores, ...]:
    """Which ranks share which cores, by where they may run."""
    found = []
    for host, every in hosts.items():
        groups: list[tuple[set[int], set[int]]] = []
        for counted in every:
            cores = set(parse_cores(counted["labels"].get("cpus", "")))
            if counted["kind"] != "rank" or counted["rank"] is None or not cores:
                continue
            ranks = {counted["rank"]}
            for other in [group for group in groups if group[1] & cores]:
                groups.remove(other)
                ranks, cores = ranks | other[0], cores | other[1]
            groups.append((ranks, cores))
        for ranks, cores in groups:
            strangers = sum(
                counted["values"].get("cpu", 0.0)
                for counted in every
                if counted["kind"] == "process"
                and (bound := parse_cores(counted["labels"].get("cpus", "")))
                and bound <= cores
            )
            found.append(SharedCores(host, tuple(sorted(ranks)), len(cores), strangers))
    return tuple(found)


def _with_ranks(every: Sequence[Counted]) -> list[Counted]:
    """The same, devices with the rank whose process computes there; None where it is no single one."""
    ranks = {c["labels"]["pid"]: c["rank"] for c in every if c["kind"] == "rank" and c["labels"].get("pid")}
    told = []
    for counted in every:
        own = {ranks[pid] for pid in counted["labels"].get("pids", "").split() if pid in ranks}
        only = counted["kind"] == "device" and counted["rank"] is None and len(own) == 1
        told.append(Counted(**{**counted, "rank": own.pop()}) if only else counted)
    return told


def stand_out(hosts: Mapping[str, Sequence[Counted]]) -> tuple[Observation, ...]:
    """What stands out of the counters of each host (`evidence.counters`), the strongest first."""
    found: list[Observation] = []
    hosts = {host: _with_ranks(every) for host, every in hosts.items()}
    shared = {
        (kind, name): [
            _Value(host, counted, value[name])
            for host, every in hosts.items()
            for counted in every
            if counted["kind"] == kind and name in (value := _derived(counted)) and np.isfinite(value[name])
        ]
        for kind, name in {(rule.kind, rule.name) for rule in RULES}
    }
    for rule in RULES:
        found += _judge(rule, shared[rule.kind, rule.name])
    found += _busy_threads(hosts)
    for host, every in hosts.items():
        found += [*_hogs(host, every), *_placement(host, every), *_far_devices(host, every), *_helpers(host, every)]
        found += _workers(host, every)
    found.sort(key=lambda o: (-o.strength, o.host, o.target, o.name))
    return tuple(found[:MOST])

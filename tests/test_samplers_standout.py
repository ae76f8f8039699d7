from __future__ import annotations

import pytest

from eroica.samplers import Kind
from eroica.samplers.evidence import Counted
from eroica.samplers.standout import MOST, Observation, stand_out


def counted(
    kind: Kind, name: str, rank: int | None = None, labels: dict[str, str] | None = None, **values: float
) -> Counted:
    return Counted(kind=kind, name=name, rank=rank, values=values, labels=labels or {})


def eight(name: str, usual: float, odd: float, kind: Kind = "rank", at: int = 3) -> dict[str, list[Counted]]:
    """Two hosts of four; one of the eight has another value."""
    rank = kind == "rank"
    return {
        f"h{host}": [
            counted(kind, str(k), k if rank else None, None, **{name: odd if k == at else usual + 1e-4 * k})
            for k in range(4 * host, 4 * host + 4)
        ]
        for host in range(2)
    }


def only(found: tuple[Observation, ...]) -> Observation:
    assert len(found) == 1, [one.text for one in found]
    return found[0]


def test_a_healthy_job_has_nothing_that_stands_out() -> None:
    hosts = {
        f"h{k}": [
            counted(
                "rank", str(k), k, {"cpus": "0-1", "state": "R"}, cpu_ratio=0.9, runqueue_ratio=0.01, process_cpu=1.2
            ),
            counted("host", "", num_cores=64, procs_running=9, stolen_cores=0.0, memory_available_ratio=0.7),
            counted("nic", "eth0", rx_gbps=3, tx_gbps=3, speed_gbps=100, rx_errors=0, rx_drops=0, carrier_changes=0),
            counted("device", "0", sm_clock_ratio=0.98, throttle=0, temperature_c=60, pcie_width_ratio=1),
        ]
        for k in range(4)
    }
    assert stand_out(hosts) == ()


def test_a_rank_that_waits_for_a_core_is_told_with_who_burns_it() -> None:
    hosts = {
        "h0": [
            counted("rank", "0", 0, {"cpus": "0"}, runqueue_ratio=0.01),
            counted("rank", "1", 1, {"cpus": "1"}, runqueue_ratio=0.47),
            counted("process", "4711", None, {"name": "stress", "cpus": "1"}, cpu=0.5),
        ]
    }
    first, second = stand_out(hosts)
    assert first.text == "rank 1's training thread waited for a core 47% of the time (peers: 1%)"
    assert first.rank == 1 and first.target == "rank 1" and first.host == "h0" and first.peers == 0.01
    assert second.text == ("stress (pid 4711), which is not of the job, uses 0.50 cores on cores where rank 1 may run")


@pytest.mark.parametrize(
    ("kind", "name", "usual", "odd", "words"),
    [
        ("rank", "throttled_ratio", 0.0, 0.3, "CPU quota"),
        ("rank", "children_cpu", 0.1, 3.0, "has started"),
        ("rank", "major_faults_per_s", 0.0, 300.0, "back from disk"),
        ("rank", "tracer_pid", 0.0, 812.0, "process 812 traces rank 3"),
        ("rank", "stopped_ratio", 0.0, 0.4, "found stopped 40% of the time"),
        ("rank", "memory_ratio", 0.5, 0.99, "memory limit"),
        ("device", "sm_clock_ratio", 0.98, 0.6, "60% of its top clock"),
        ("device", "pcie_width_ratio", 1.0, 0.5, "50% of its lanes"),
        ("device", "num_nvlinks", 18.0, 17.0, "17 NVLinks"),
        ("device", "uncorrected_ecc", 0.0, 2.0, "could not be corrected"),
        ("device", "throttle_hw_thermal", 0.0, 0.8, "temperature"),
        ("nic", "speed_gbps", 100.0, 25.0, "25 Gbit/s"),
        ("nic", "carrier_changes", 0.0, 4.0, "carrier 4 times"),
        ("port", "symbol_error", 0.0, 9.0, "9 more of symbol_error"),
        ("port", "rp_cnp_handled_per_s", 40.0, 9000.0, "rp_cnp_handled"),
        ("host", "memory_pressure", 0.0, 0.4, "waits for memory"),
    ],
)
def test_one_of_eight_that_differs_is_told_alone(kind: Kind, name: str, usual: float, odd: float, words: str) -> None:
    found = stand_out(eight(name, usual, odd, kind))
    told = only(tuple(one for one in found if one.host == "h0" and abs(one.value - odd) < 1e-9))
    assert words in told.text and told.name == name and told.strength >= 1
    assert len(found) == 1


def test_a_power_cap_that_is_active_on_healthy_devices_is_no_observation() -> None:
    devices = [
        counted("device", str(k), None, None, throttle=k % 2, throttle_power_cap=k % 2, sm_clock_ratio=0.9)
        for k in range(8)
    ]
    assert stand_out({"h0": devices}) == ()


def test_a_lowered_clock_is_told_with_its_reasons() -> None:
    hosts = eight("sm_clock_ratio", 0.98, 0.6, "device")
    hosts["h0"][3]["labels"]["reasons"] = "power_cap"
    assert only(stand_out(hosts)).text.endswith("reasons: power_cap")


def test_an_unused_device_has_a_low_clock_and_that_is_no_observation() -> None:
    devices = [counted("device", str(k), sm_clock_ratio=0.98, temperature_c=65, busy_ratio=0.9) for k in range(7)]
    devices.append(counted("device", "7", sm_clock_ratio=0.1, temperature_c=30, busy_ratio=0.0))
    assert stand_out({"h0": devices}) == ()


def test_a_rank_bound_to_the_other_socket_than_its_device_is_told() -> None:
    hosts = {
        "h0": [
            counted("rank", "0", 0, {"cpus": "0-31", "pid": "10"}),
            counted("rank", "4", 4, {"cpus": "0-31", "pid": "14"}),
            counted("device", "0", None, {"cpus": "0-31", "pids": "10"}),
            counted("device", "4", None, {"cpus": "32-63", "pids": "14 99"}),
        ]
    }
    told = only(stand_out(hosts))
    assert told.rank == 4
    assert told.text == "rank 4 is bound to cores 0-31, and its device 4 is attached to cores 32-63"


def test_a_scattered_value_does_not_stand_out() -> None:
    scattered = [0.2, 1.4, 0.5, 2.4, 0.9, 1.9, 0.1, 2.0]
    hosts = {"h0": [counted("rank", str(k), k, None, process_cpu=cpu) for k, cpu in enumerate(scattered)]}
    assert stand_out(hosts) == ()


def test_a_thread_that_only_one_rank_runs_is_told_by_name() -> None:
    hosts = {
        "h0": [
            *(counted("rank", str(k), k, None, cpu_ratio=0.9) for k in range(4)),
            *(counted("thread", f"{k}/omp {k}", k, None, cpu_ratio=0.2) for k in range(4)),
            counted("thread", "2/pt_data_pin 77", 2, None, cpu_ratio=0.9),
        ]
    }
    told = only(stand_out(hosts))
    assert told.rank == 2 and "pt_data_pin 77" in told.text and "1.10 cores (peers: 0.20)" in told.text


def test_a_rate_below_zero_as_no_host_has_it_ends_nothing() -> None:
    hosts = {"h0": [counted("thread", "0/omp 7", 0, None, cpu_ratio=-1.0), counted("rank", "1", 1, None)]}
    assert all(one.rank == 1 for one in stand_out(hosts))


def test_ranks_that_share_too_few_cores_and_ranks_that_are_stopped_are_told() -> None:
    hosts = {
        "h0": [
            counted("rank", "0", 0, {"cpus": "0", "state": "R"}),
            counted("rank", "1", 1, {"cpus": "0", "state": "S"}),
            counted("rank", "2", 2, {"cpus": "1-7", "state": "T"}),
        ]
    }
    assert [one.text for one in stand_out(hosts)] == [
        "rank 2 is stopped (state T), by a signal or a tracer",
        "ranks 0-1 share 1 core",
    ]


def test_a_few_retransmits_among_few_segments_are_nothing() -> None:
    assert stand_out({"h0": [counted("host", "", tcp_retransmits=3, tcp_sent=20)]}) == ()
    assert "sent again" in only(stand_out({"h0": [counted("host", "", tcp_retransmits=500, tcp_sent=9000)]})).text


def test_observations_are_bounded_and_names_from_the_job_are_cleaned() -> None:
    every = [counted("process", str(k), None, {"name": "x\x1b[31m\n", "cpus": "0"}, cpu=0.9) for k in range(100)]
    found = stand_out({"h0": every})
    assert len(found) == MOST and all("\x1b" not in one.text and "\n" not in one.text for one in found)


def test_renaming_ranks_renames_observations_and_changes_nothing_else() -> None:
    plain = eight("runqueue_ratio", 0.01, 0.5)
    renamed = {
        host: [counted("rank", str(7 - k), 7 - k, None, **c["values"]) for c in every if (k := c["rank"]) is not None]
        for host, every in plain.items()
    }
    one, other = only(stand_out(plain)), only(stand_out(renamed))
    assert one.rank == 3 and other.rank == 4
    assert one.text.replace("rank 3", "") == other.text.replace("rank 4", "")


def test_threads_beside_the_training_threads_are_told_together_if_they_take_much_of_the_host() -> None:
    def host(beside: float) -> dict[str, list[Counted]]:
        ranks = [counted("rank", str(k), k, None, cpu_ratio=0.2, process_cpu=0.2 + beside) for k in range(4)]
        return {"h0": [*ranks, counted("host", "", num_cores=2)]}

    found = only(stand_out(host(0.25)))
    assert (found.name, found.rank) == ("helper_cores", None)
    assert found.text == "threads beside the training threads of 4 ranks use 1 of 2 cores, these themselves 0.8"
    assert stand_out(host(0.01)) == ()


def test_reading_from_disks_and_busy_cores_are_told() -> None:
    hosts = {"h0": [counted("rank", "0", 0, file_read_mbps=40.0), counted("host", "", num_cores=4, busy_cores=3.9)]}
    assert {found.text for found in stand_out(hosts)} == {
        "rank 0 reads 40 MB/s from disks",
        "this host's cores are busy 98% of the time",
    }

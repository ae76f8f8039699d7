from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace

from eroica.samplers import Missing, Rank, Reading
from eroica.samplers.nvml import SLOW_NS, Nvml
from eroica.samplers.nvml import open_sampler as open_nvml
from eroica.samplers.rdma import Rdma
from eroica.samplers.rdma import open_sampler as open_rdma

SECOND = 1_000_000_000


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"NVML error {value}")
        self.value = value


class _Value(ctypes.Union):
    _fields_ = (("uiVal", ctypes.c_uint), ("ullVal", ctypes.c_ulonglong))


class _Field(ctypes.Structure):
    _fields_ = (("valueType", ctypes.c_uint), ("nvmlReturn", ctypes.c_uint), ("value", _Value))


class FakeNvml:
    """Functions of pynvml's names, as far as the sampler asks for them; a device is a dict of what it answers."""

    NVMLError = NVMLError
    NVML_CLOCK_SM = 1
    NVML_PCIE_UTIL_TX_BYTES, NVML_PCIE_UTIL_RX_BYTES = 0, 1
    NVML_NVLINK_MAX_LINKS = 4
    NVML_FI_DEV_PCIE_COUNT_TX_BYTES, NVML_FI_DEV_PCIE_COUNT_RX_BYTES = 197, 198
    NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX = 138, 139

    def __init__(self, *devices: dict[str, object]) -> None:
        self.devices = devices
        self.asked: list[str] = []
        self.constants: list[str] = []

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetCount(self) -> int:
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> dict[str, object]:
        return self.devices[index]

    def __getattr__(self, name: str) -> object:
        if not name.startswith("nvmlDeviceGet"):
            self.constants.append(name)
            raise AttributeError(name)

        def answer(handle: dict[str, object], *arguments: object) -> object:
            self.asked.append(name)
            key = name.removeprefix("nvmlDeviceGet")
            if handle.get("lost"):
                raise NVMLError(15)
            if key == "NvLinkState":
                states = handle.get("NvLinkState", [])
                assert isinstance(states, list)
                if arguments[0] >= len(states):  # type: ignore[operator]
                    raise NVMLError(3)
                return states[arguments[0]]  # type: ignore[call-overload]
            if key not in handle:
                raise NVMLError(3)
            return handle[key]

        return answer


def healthy() -> dict[str, object]:
    return {
        "Name": "NVIDIA H100",
        "UUID": b"GPU-1",
        "PciInfo": SimpleNamespace(busId="00000000:18:00.0"),
        "MaxClockInfo": 1980,
        "ClockInfo": 1980,
        "CurrentClocksEventReasons": 0,
        "PowerUsage": 650_000,
        "EnforcedPowerLimit": 700_000,
        "Temperature": 61,
        "UtilizationRates": SimpleNamespace(gpu=97, memory=40),
        "CurrPcieLinkWidth": 16,
        "MaxPcieLinkWidth": 16,
        "CurrPcieLinkGeneration": 5,
        "PcieReplayCounter": 0,
        "TotalEccErrors": 0,
        "RetiredPages": [],
        "RemappedRows": (0, 0, 0, 0),
        "NvLinkState": [1, 1, 1],
        "NvLinkErrorCounter": 2,
        "ComputeRunningProcesses": [SimpleNamespace(pid=42, usedGpuMemory=1)],
    }


def opened(*devices: dict[str, object]) -> tuple[Nvml, FakeNvml]:
    library = FakeNvml(*devices)
    sampler = open_nvml(Path("/"), library)
    assert isinstance(sampler, Nvml)
    return sampler, library


def of(reading: Reading, name: str) -> dict[str, float]:
    return next(dict(values) for target, values in reading.values.items() if target.name == name)


def test_a_device_tells_clock_power_heat_links_and_whose_processes_run() -> None:
    sampler, _ = opened(healthy())
    reading = sampler.read(SECOND, [])
    told = of(reading, "0")
    assert told["sm_clock_ratio"] == 1 and told["throttle"] == 0 and told["power_w"] == 650
    assert told["busy_ratio"] == 0.97 and told["pcie_width_ratio"] == 1 and told["lost"] == 0
    assert told["num_nvlinks"] == 3 and told["nvlink_errors"] == 3 * 4 * 2 and told["retired_pages"] == 0
    (labels,) = reading.labels.values()
    assert labels["pids"] == "42" and labels["uuid"] == "GPU-1" and labels["pci"] == "00000000:18:00.0"


def test_a_device_tells_the_cores_that_it_is_attached_to(tmp_path: Path) -> None:
    (tmp_path / "0000:18:00.0").mkdir()
    (tmp_path / "0000:18:00.0" / "local_cpulist").write_text("0-31,64-95\n")
    sampler = open_nvml(Path("/"), FakeNvml(healthy()), tmp_path)
    assert isinstance(sampler, Nvml)
    assert [labels["cpus"] for labels in sampler.read(SECOND, []).labels.values()] == ["0-31,64-95"]


def test_a_lowered_clock_is_told_with_its_reasons() -> None:
    sampler, _ = opened({**healthy(), "ClockInfo": 1188, "CurrentClocksEventReasons": 0x40 | 0x1})
    reading = sampler.read(SECOND, [])
    told = of(reading, "0")
    assert told["sm_clock_ratio"] == 0.6 and told["throttle"] == 1 and told["throttle_hw_thermal"] == 1
    assert [labels["reasons"] for labels in reading.labels.values()] == ["hw_thermal"]


def test_an_idle_device_and_clocks_that_were_set_are_no_throttling() -> None:
    sampler, _ = opened({**healthy(), "CurrentClocksEventReasons": 0x1 | 0x2 | 0x100})
    assert of(sampler.read(SECOND, []), "0")["throttle"] == 0


def test_old_drivers_are_asked_by_the_old_name() -> None:
    device = healthy()
    device["CurrentClocksThrottleReasons"] = device.pop("CurrentClocksEventReasons")
    sampler, _ = opened({**device, "CurrentClocksThrottleReasons": 0x8})
    assert of(sampler.read(SECOND, []), "0")["throttle_hw_slowdown"] == 1


def test_what_a_device_does_not_support_is_absent() -> None:
    sampler, _ = opened({"ClockInfo": 1000, "CurrPcieLinkWidth": 0xFFFFFFFF})
    assert of(sampler.read(SECOND, []), "0") == {"sm_clock_mhz": 1000, "lost": 0}


def test_counts_of_links_are_taken_only_if_they_are_wide_enough_not_to_wrap() -> None:
    fields = (_Field * 4)()
    for field, kind in zip(fields, (3, 1, 3, 3), strict=True):
        field.valueType, field.value.ullVal = kind, 5_000_000_000
    fields[3].nvmlReturn = 3
    sampler, _ = opened({**healthy(), "FieldValues": fields})
    told = of(sampler.read(SECOND, []), "0")
    assert told["pcie_tx_bytes"] == 5_000_000_000 and told["nvlink_tx_kib"] == 5_000_000_000
    assert "pcie_rx_bytes" not in told and "nvlink_rx_kib" not in told


def test_slow_questions_are_asked_of_one_device_per_read_and_seldom() -> None:
    sampler, library = opened({**healthy(), "PcieThroughput": 1_000_000}, {**healthy(), "PcieThroughput": 2_000_000})
    for k in range(4):
        library.asked.clear()
        reading = sampler.read(SECOND + k, [])
        assert library.asked.count("nvmlDeviceGetPcieThroughput") == (2 if k < 2 else 0)
    assert "pcie_rx_now_gbps" not in of(reading, "0")
    again = sampler.read(SECOND + SLOW_NS, [])
    assert of(again, "0")["pcie_rx_now_gbps"] == 1.0, "KB/s of NVML, told as GB/s"


def test_a_device_that_fell_off_the_bus_is_told_as_lost() -> None:
    device = healthy()
    sampler, _ = opened(device, healthy())
    device["lost"] = True
    reading = sampler.read(SECOND, [])
    assert of(reading, "0") == {"lost": 1} and of(reading, "1")["lost"] == 0


def test_without_a_driver_or_in_a_recorded_tree_the_sampler_says_why(tmp_path: Path) -> None:
    class NoDriver(FakeNvml):
        def nvmlInit(self) -> None:
            raise NVMLError(9)

    found = open_nvml(Path("/"), NoDriver())
    assert isinstance(found, Missing) and "NVML error 9" in found.reason
    assert isinstance(open_nvml(tmp_path), Missing)
    assert isinstance(open_nvml(Path("/"), FakeNvml()), Missing)


def test_pynvml_has_all_functions_and_constants_that_are_asked_for() -> None:
    import pynvml  # type: ignore[import-untyped]

    sampler, library = opened({**healthy(), "FieldValues": (), "PcieThroughput": 1})
    for k in range(2):
        sampler.read(SECOND + k * SLOW_NS, [])
    constants = {name for name in dir(FakeNvml) if name.startswith("NVML_")} | set(library.constants)
    assert not [name for name in {*library.asked, *constants} if not hasattr(pynvml, name)]
    assert len(set(library.asked)) > 20 and len(constants) > 9


def port(root: Path, name: str, files: dict[str, str]) -> None:
    for file, text in files.items():
        path = root / "sys/class/infiniband" / name.replace("/", "/ports/") / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


MLX5 = {
    "state": "4: ACTIVE",
    "phys_state": "5: LinkUp",
    "rate": "200 Gb/sec (4X HDR)",
    "link_layer": "Ethernet",
    "counters/port_rcv_data": "1000",
    "counters/port_xmit_data": "2000",
    "counters/symbol_error": "7",
    "counters/link_downed": "1",
    "counters/port_rcv_errors": "0",
    "counters/port_xmit_wait": "12",
    "hw_counters/np_cnp_sent": "33",
    "hw_counters/rp_cnp_handled": "44",
    "hw_counters/out_of_sequence": "5",
    "hw_counters/lifespan": "10",
}


def test_a_port_tells_bytes_errors_congestion_and_speed(tmp_path: Path) -> None:
    port(tmp_path, "mlx5_0/1", MLX5)
    port(tmp_path, "mlx5_1/1", {**MLX5, "state": "1: DOWN", "rate": "40 Gb/sec (4X QDR)"})
    sampler = open_rdma(tmp_path)
    assert isinstance(sampler, Rdma)
    reading = sampler.read(SECOND, [Rank(0, 1)])
    told = of(reading, "mlx5_0/1")
    assert told["port_rx_bytes"] == 4000 and told["port_tx_bytes"] == 8000, "counted in words of four bytes"
    assert told["symbol_error"] == 7 and told["link_downed"] == 1 and told["xmit_wait"] == 12
    assert told["np_cnp_sent"] == 33 and told["port_speed_gbps"] == 200 and told["port_active"] == 1
    assert of(reading, "mlx5_1/1")["port_active"] == 0 and of(reading, "mlx5_1/1")["port_speed_gbps"] == 40
    assert "lifespan" not in told and "packet_seq_err" not in told
    assert {(t.name, labels["state"], labels["link"]) for t, labels in reading.labels.items()} == {
        ("mlx5_0/1", "ACTIVE", "Ethernet"),
        ("mlx5_1/1", "DOWN", "Ethernet"),
    }


def test_the_firmware_is_asked_for_errors_once_a_second_and_bytes_at_each_read(tmp_path: Path) -> None:
    port(tmp_path, "mlx5_0/1", MLX5)
    sampler = open_rdma(tmp_path)
    assert isinstance(sampler, Rdma)
    sampler.read(SECOND, [])
    assert set(of(sampler.read(SECOND + 1, []), "mlx5_0/1")) == {"port_rx_bytes", "port_tx_bytes"}
    assert "symbol_error" in of(sampler.read(2 * SECOND, []), "mlx5_0/1")


def test_a_port_without_standard_counters_is_read_by_its_own(tmp_path: Path) -> None:
    port(
        tmp_path,
        "efa_0/1",
        {
            "state": "4: ACTIVE",
            "hw_counters/rx_bytes": "10",
            "hw_counters/tx_bytes": "20",
            "rate": "100 Gb/sec (4X EDR)",
        },
    )
    sampler = open_rdma(tmp_path)
    assert isinstance(sampler, Rdma)
    told = of(sampler.read(SECOND, []), "efa_0/1")
    assert told["port_rx_bytes"] == 10 and told["port_tx_bytes"] == 20


def test_a_host_without_ports_says_so(tmp_path: Path) -> None:
    assert isinstance(open_rdma(tmp_path), Missing)

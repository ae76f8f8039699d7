"""NVIDIA devices through NVML: clocks, why they are lowered, power, heat, links, errors, and whose processes are there.

`pynvml` (package nvidia-ml-py, extra `live`) is imported when the sampler is opened; without it, or without a driver,
the sampler says so. A function that a device or driver does not have leaves its value out. NVML answers from the
driver's memory in microseconds, but for two kinds: errors and links, which are read once in `SLOW_NS`, one device per
read, and the PCIe throughput of old drivers, which waits 20 ms for each direction and is read as seldom.

Not here: judgement. A software power cap is active on many a healthy busy device. Used through `eroica.samplers`.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from eroica.samplers import Metric, Missing, Rank, Reading, Target
from eroica.samplers.proc import read_text

SLOW_NS = 5_000_000_000
"""Between two looks at a device's errors, links and processes."""
NOT_AVAILABLE = 0xFFFFFFFF
"""What 32-bit functions of NVML return for "not known"."""
ALL_LINKS = 0xFFFFFFFF
KIB = 1024.0
PCI = Path("/sys/bus/pci/devices")

REASONS = {
    0x4: "power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "thermal",
    0x40: "hw_thermal",
    0x80: "power_brake",
}
"""Bits of the clock event reasons (nvml.h) that lower clocks. Left out: idle, application clocks, display clocks, which
somebody has set."""

METRICS: Mapping[str, Metric] = {
    "sm_clock_mhz": Metric("MHz"),
    "sm_clock_ratio": Metric(""),
    "throttle": Metric("", over="mean"),
    **{f"throttle_{name}": Metric("", over="mean") for name in REASONS.values()},
    "power_w": Metric("W"),
    "power_limit_w": Metric("W"),
    "temperature_c": Metric("C"),
    "busy_ratio": Metric(""),
    "memory_busy_ratio": Metric(""),
    "pcie_rx_bytes": Metric("GB/s", True, "pcie_rx_gbps", 1e9),
    "pcie_tx_bytes": Metric("GB/s", True, "pcie_tx_gbps", 1e9),
    "pcie_rx_now_gbps": Metric("GB/s"),
    "pcie_tx_now_gbps": Metric("GB/s"),
    "pcie_width": Metric("lanes"),
    "pcie_width_ratio": Metric(""),
    "pcie_generation": Metric(""),
    "pcie_replays": Metric("", True),
    "nvlink_rx_kib": Metric("GB/s", True, "nvlink_rx_gbps", 1e9 / KIB),
    "nvlink_tx_kib": Metric("GB/s", True, "nvlink_tx_gbps", 1e9 / KIB),
    "num_nvlinks": Metric("links"),
    "nvlink_errors": Metric("", True),
    "uncorrected_ecc": Metric("", True),
    "retired_pages": Metric("pages"),
    "remapped_rows": Metric("rows"),
    "num_processes": Metric(""),
    "lost": Metric("", over="max"),
}
"""`pcie_*_now_gbps` stand in for the counts where the driver has none. `gbps` of PCIe and NVLink are gigabytes."""

_FIELDS = {
    "pcie_tx_bytes": ("NVML_FI_DEV_PCIE_COUNT_TX_BYTES", 0),
    "pcie_rx_bytes": ("NVML_FI_DEV_PCIE_COUNT_RX_BYTES", 0),
    "nvlink_tx_kib": ("NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX", ALL_LINKS),
    "nvlink_rx_kib": ("NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX", ALL_LINKS),
}
_WIDE = {2: "ulVal", 3: "ullVal", 4: "sllVal"}
"""Value types of 64 bits. A count of 32 bits wraps within a tenth of a second at the speed of a link: not used."""
_LOST = 15  # NVML_ERROR_GPU_IS_LOST


class _Library:
    """NVML functions by name: what fails or is not there gives None."""

    def __init__(self, module: object) -> None:
        self._module = module
        failure = getattr(module, "NVMLError", None)
        self._failure = failure if isinstance(failure, type) and issubclass(failure, Exception) else RuntimeError
        self.lost = False
        """The last failure was that the device has fallen off the bus."""

    def ask(self, name: str, *arguments: object) -> object:
        function = getattr(self._module, name, None)
        if not callable(function):
            return None
        try:
            found: object = function(*arguments)
            return found
        except self._failure as error:
            self.lost = self.lost or getattr(error, "value", None) == _LOST
            return None

    def number(self, name: str, *arguments: object) -> float | None:
        found = self.ask(name, *arguments)
        return float(found) if isinstance(found, int | float) and found != NOT_AVAILABLE else None

    def constant(self, name: str, default: int = 0) -> int:
        found = getattr(self._module, name, default)
        return found if isinstance(found, int) else default


def _text(found: object) -> str:
    # Old versions of pynvml give bytes.
    return found.decode("utf-8", "replace") if isinstance(found, bytes) else str(found or "")


def _items(found: object) -> list[object]:
    """Elements of a list or of an array of ctypes, [] of anything else."""
    # An array of ctypes can be walked and is no Iterable.
    return list(found) if isinstance(found, Iterable | ctypes.Array) else []


class Nvml:
    """All devices of this host."""

    def __init__(self, library: _Library, handles: Sequence[object], devices: Path = PCI) -> None:
        self._library, self._handles = library, tuple(handles)
        self._top = [library.number("nvmlDeviceGetMaxClockInfo", h, self._constant("CLOCK_SM")) for h in handles]
        self._labels = [
            {
                "name": _text(library.ask("nvmlDeviceGetName", handle)),
                "uuid": _text(library.ask("nvmlDeviceGetUUID", handle)),
                "pci": _text(getattr(library.ask("nvmlDeviceGetPciInfo", handle), "busId", "")),
                "pids": "",
                "reasons": "",
            }
            for handle in handles
        ]
        for labels in self._labels:
            # NVML writes the domain with eight digits, sysfs with four.
            place = devices / labels["pci"].lower()[-12:] / "local_cpulist"
            labels["cpus"] = read_text(place).strip() if labels["pci"] else ""
        self._counted: list[bool] = [True] * len(self._handles)
        self._slow_ns: list[int | None] = [None] * len(self._handles)

    def _constant(self, name: str) -> int:
        return self._library.constant(f"NVML_{name}")

    @property
    def metrics(self) -> Mapping[str, Metric]:
        """See `METRICS`."""
        return METRICS

    def read(self, now_ns: int, ranks: Sequence[Rank]) -> Reading:
        """All devices; what is slow to ask, of at most one of them."""
        targets = [Target("device", str(index)) for index in range(len(self._handles))]
        values = {target: self._fast(index) for index, target in enumerate(targets)}
        due = [k for k, at in enumerate(self._slow_ns) if at is None or now_ns - at >= SLOW_NS]
        if due:
            index = min(due, key=lambda k: self._slow_ns[k] or 0)
            self._slow_ns[index] = now_ns
            values[targets[index]] |= self._slow(index)
        return Reading(values, {target: dict(self._labels[k]) for k, target in enumerate(targets)})

    def _fast(self, index: int) -> dict[str, float]:
        library, handle = self._library, self._handles[index]
        library.lost = False
        found: dict[str, float] = {}
        clock = library.number("nvmlDeviceGetClockInfo", handle, self._constant("CLOCK_SM"))
        top = self._top[index]
        if clock is not None:
            found["sm_clock_mhz"] = clock
            if top:
                found["sm_clock_ratio"] = clock / top
        reasons = library.number("nvmlDeviceGetCurrentClocksEventReasons", handle)
        if reasons is None:
            reasons = library.number("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        if reasons is not None:
            active = [name for bit, name in REASONS.items() if int(reasons) & bit]
            found["throttle"] = float(bool(active))
            found |= {f"throttle_{name}": float(name in active) for name in REASONS.values()}
            self._labels[index]["reasons"] = " ".join(active)
        for name, function, per in (
            ("power_w", "nvmlDeviceGetPowerUsage", 1000.0),
            ("power_limit_w", "nvmlDeviceGetEnforcedPowerLimit", 1000.0),
        ):
            value = library.number(function, handle)
            if value is not None:
                found[name] = value / per
        value = library.number("nvmlDeviceGetTemperature", handle, self._constant("TEMPERATURE_GPU"))
        if value is not None:
            found["temperature_c"] = value
        use = library.ask("nvmlDeviceGetUtilizationRates", handle)
        for name, part in (("busy_ratio", "gpu"), ("memory_busy_ratio", "memory")):
            share = getattr(use, part, None)
            if isinstance(share, int):
                found[name] = share / 100
        if self._counted[index]:
            counts = self._counts(handle)
            self._counted[index] = bool(counts)
            found |= counts
        found["lost"] = float(library.lost)
        return found

    def _counts(self, handle: object) -> dict[str, float]:
        """What the links carried since the driver was loaded, by field values: one call for all of them."""
        wanted = {name: (self._library.constant(field), scope) for name, (field, scope) in _FIELDS.items()}
        wanted = {name: field for name, field in wanted.items() if field[0]}
        fields = self._library.ask("nvmlDeviceGetFieldValues", handle, list(wanted.values()))
        found: dict[str, float] = {}
        for name, field in zip(wanted, _items(fields), strict=False):
            kind = _WIDE.get(getattr(field, "valueType", -1))
            if getattr(field, "nvmlReturn", 1) == 0 and kind is not None:
                value = getattr(getattr(field, "value", None), kind, None)
                if isinstance(value, int):
                    found[name] = float(value)
        return found

    def _slow(self, index: int) -> dict[str, float]:
        library, handle = self._library, self._handles[index]
        found: dict[str, float] = {}
        width, most = (library.number(f"nvmlDeviceGet{which}PcieLinkWidth", handle) for which in ("Curr", "Max"))
        if width is not None:
            found["pcie_width"] = width
            if most:
                found["pcie_width_ratio"] = width / most
        for name, function, arguments in (
            ("pcie_generation", "nvmlDeviceGetCurrPcieLinkGeneration", ()),
            ("pcie_replays", "nvmlDeviceGetPcieReplayCounter", ()),
            (
                "uncorrected_ecc",
                "nvmlDeviceGetTotalEccErrors",
                (self._constant("MEMORY_ERROR_TYPE_UNCORRECTED"), self._constant("VOLATILE_ECC")),
            ),
        ):
            value = library.number(function, handle, *arguments)
            if value is not None:
                found[name] = value
        retired = [library.ask("nvmlDeviceGetRetiredPages", handle, cause) for cause in (0, 1)]
        if any(pages is not None for pages in retired):
            found["retired_pages"] = float(sum(len(_items(pages)) for pages in retired))
        rows = library.ask("nvmlDeviceGetRemappedRows", handle)
        if isinstance(rows, Sequence) and len(rows) >= 2:
            found["remapped_rows"] = float(rows[0] + rows[1])
        found |= self._links(handle)
        processes = library.ask("nvmlDeviceGetComputeRunningProcesses", handle)
        if processes is not None:
            pids = sorted(pid for p in _items(processes) if isinstance(pid := getattr(p, "pid", None), int))
            found["num_processes"] = float(len(pids))
            self._labels[index]["pids"] = " ".join(map(str, pids))
        if not self._counted[index]:
            for name, counter in (
                ("pcie_tx_now_gbps", "PCIE_UTIL_TX_BYTES"),
                ("pcie_rx_now_gbps", "PCIE_UTIL_RX_BYTES"),
            ):
                value = library.number("nvmlDeviceGetPcieThroughput", handle, self._constant(counter))
                if value is not None:
                    found[name] = value * 1e3 / 1e9
        return found

    def _links(self, handle: object) -> dict[str, float]:
        """NVLinks that are up, and the sum of their replay, recovery and CRC errors."""
        up, errors, known = 0, 0.0, False
        for link in range(self._library.constant("NVML_NVLINK_MAX_LINKS", 18)):
            state = self._library.number("nvmlDeviceGetNvLinkState", handle, link)
            if state is None:
                # Links are numbered from 0 without holes: the first that is not there ends them.
                break
            known = True
            up += state == 1
            for counter in range(4):  # replay, recovery, CRC of flits, CRC of data
                errors += self._library.number("nvmlDeviceGetNvLinkErrorCounter", handle, link, counter) or 0.0
        return {"num_nvlinks": float(up), "nvlink_errors": errors} if known else {}


def open_sampler(root: Path, library: object = None, devices: Path = PCI) -> Nvml | Missing:
    """A sampler of this host's devices. For tests: `library`, a module with pynvml's functions, and sysfs's PCI
    devices."""
    if library is None:
        if root != Path("/"):
            return Missing("nvml", f"{root} is a recorded tree, and devices are asked through their driver")
        try:
            library = importlib.import_module("pynvml")
        except ImportError:
            return Missing("nvml", "pynvml is not installed; pip install 'eroica[live]' for NVIDIA counters")
    asked = _Library(library)
    failure = asked._failure
    try:
        getattr(library, "nvmlInit")()  # noqa: B009
    except failure as error:
        return Missing("nvml", f"NVML does not start ({error}); on a host with NVIDIA devices, check nvidia-smi")
    count = asked.number("nvmlDeviceGetCount") or 0
    handles = [asked.ask("nvmlDeviceGetHandleByIndex", index) for index in range(int(count))]
    if not handles or None in handles:
        return Missing(
            "nvml", f"NVML lists {int(count)} devices and opens {len(handles) - handles.count(None)} of them"
        )
    return Nvml(asked, handles, devices)

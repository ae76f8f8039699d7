"""What the environment snapshots say that costs time: settings that slow every step down, on all ranks that have them.

Nothing changes in a job that has run so from its first step on, so there is no outlier and no past to compare it with:
the setting itself is the signal, borne out by what only it leaves in traces and counters. Each rule says how it shows,
what it costs where that can be known, and what to do. What costs too little, or does so only sometimes, is a note and
no finding. Used by `diagnosis`; a rule never looks at how long an iteration is to decide that a setting is on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from eroica.blame import Indices
from eroica.causes import BLOCKING, CROWDED, ON_THE_CPU, columns_of, grants, mean_grant
from eroica.collectives import Float64s
from eroica.context import Context
from eroica.findings import FunctionName
from eroica.localization import EFFECT_FLOOR
from eroica.pattern import Stacked

WORTH = 0.05
"""Share of the iteration that a setting must cost to be a finding, where its cost is known: as much as makes a level
slow (`pace.EFFECT`)."""
FEW_CHECKS = 3.0
"""Checks for NaN in an iteration that only anomaly detection makes; a script may make one or two of its own."""
WHOLE = 0.05
"""Bytes reduced per step may differ so much from a multiple of the gradients': buffers, counts and losses come on
top."""
MOST_ROUNDS = 1024


@dataclass(frozen=True, slots=True)
class Costly:
    """A setting that costs time."""

    ranks: Indices
    """Rows that have it."""
    function: FunctionName
    """The setting, as a person writes it, and the line that asks for it, where that is known."""
    because: str
    evidence: Mapping[str, object]
    seconds: float | None
    """Per iteration; None: not known from this window."""
    advice: str
    covers: frozenset[str] = frozenset()
    """Causes of a common rise that it stands for: they are what it looks like."""
    is_finding: bool = True
    """Else it is worth a note."""
    settings: frozenset[str] = frozenset()
    """Names in the snapshot: a finding of a cause that has them (`Cause.settings`) tells the same thing."""


def costly_settings(stacked: Stacked, context: Context, iteration_s: float, transfer_s: Float64s) -> list[Costly]:
    """All that is found. `transfer_s`: (W,) exposed transfer of each rank per iteration."""
    found = [
        *_anomaly(stacked, context, iteration_s),
        *_threads(stacked, context, iteration_s),
        *_rounds(stacked, context, iteration_s, transfer_s),
        *_modes(stacked, context),
    ]
    return sorted(found, key=lambda costly: -(costly.seconds or 0.0))


def _of(stacked: Stacked, context: Context, row: int) -> Mapping[str, object]:
    return context.settings.get(int(stacked.ranks[row]), {})


def _having(stacked: Stacked, context: Context, test: Callable[[Mapping[str, object]], bool]) -> Indices:
    """Rows whose snapshot passes; no test passes one that is not there."""
    rows = range(len(stacked)) if context.settings else ()
    return np.array([w for w in rows if test(_of(stacked, context, w))], np.intp)


def _worth(seconds: float, iteration_s: float) -> float | None:
    return seconds if seconds >= EFFECT_FLOOR * iteration_s else None


# --- anomaly detection -----------------------------------------------------------------------------------------------

_CHECK = "aten::_is_any_true"
"""By which anomaly detection looks at each gradient; hardly called by anybody else."""
_CHECKS = frozenset({_CHECK, "aten::isnan", "aten::ne", "aten::any", "aten::item", "aten::_local_scalar_dense"})
"""Operators that belong to one such look."""
_NODE = "autograd::engine::evaluate_function: "
"""Before the name of a node of the backward pass; each keeps the traceback of the forward operator that made it."""
_LEAF = "torch::autograd::AccumulateGrad"
"""The node that lasts as long as its parameter does, and is not made anew."""


def _anomaly(stacked: Stacked, context: Context, iteration_s: float) -> Iterator[Costly]:
    """The mode is on now, or the trace holds its checks. A script that asked for it once need not have it still."""
    columns = np.array([k for k, f in enumerate(stacked.functions) if f.name in _CHECKS], np.intp)
    sure = [k for k in columns if stacked.functions[k].name == _CHECK]
    counts = np.nansum(stacked.count[:, sure], axis=1) if sure else np.zeros(len(stacked))
    is_on = _having(stacked, context, lambda told: told.get("torch.anomaly_mode") is True)
    ranks = np.union1d(is_on, np.flatnonzero(counts >= FEW_CHECKS)).astype(np.intp)
    if not len(ranks):
        return
    places = {str(told["anomaly.1.at"]): str(told.get("anomaly.1.in", ""))
              for w in ranks if "anomaly.1.at" in (told := _of(stacked, context, int(w)))}  # fmt: skip
    place, function = next(iter(sorted(places.items())), (None, None))
    # The others of these operators belong to a look if they run as often as looks are taken.
    usual = np.nanmedian(np.where(np.isfinite(stacked.count), stacked.count, 0.0)[ranks], axis=0)
    checks = float(np.median(counts[ranks]))
    columns = columns[np.abs(usual[columns] - checks) <= 0.2 * checks]
    seconds = float(np.median(stacked.beta[np.ix_(ranks, columns)].sum(1) * stacked.iteration_s[ranks]))
    because = (
        "anomaly detection of autograd is on: each operator keeps a traceback and each gradient is checked for NaN"
    )
    if checks >= FEW_CHECKS:
        because += f", {checks:.0f} times per iteration"
    nodes, tracebacks_s = _tracebacks(stacked, context, ranks)
    if tracebacks_s > 0:
        because += f"; {nodes:.0f} tracebacks per iteration cost {1e3 * tracebacks_s:.3g} ms more, by what one takes"
    elif checks >= FEW_CHECKS:
        because += "; the tracebacks come on top"
    yield Costly(
        ranks,
        FunctionName("setting", "torch.autograd.set_detect_anomaly(True)", place, place, function or None),
        because,
        {"checks_per_iteration": checks, "checks_s": seconds, "tracebacks_s": tracebacks_s},
        _worth(seconds + tracebacks_s, iteration_s),
        "Take set_detect_anomaly and detect_anomaly out, or keep them to the run in which a NaN is looked for.",
        frozenset({"unknown", "host_python", "version_change", "cpu_contention"}),
        settings=frozenset({"torch.anomaly_mode"}),
    )


def _tracebacks(stacked: Stacked, context: Context, ranks: Indices) -> tuple[float, float]:
    """Tracebacks that the mode keeps per iteration, by the nodes of the backward pass, and their seconds, by what one
    took in these ranks; 0 = not known. Not more than the training thread held the iteration up outside of them."""
    named = enumerate(stacked.functions)
    nodes = np.array([k for k, f in named if f.name.startswith(_NODE) and not f.name.endswith(_LEAF)], np.intp)
    count = float(np.median(np.nansum(stacked.count[np.ix_(ranks, nodes)], axis=1)))
    took_s = [s for w in ranks if (s := _number(_of(stacked, context, int(w)).get("anomaly.traceback_s"))) > 0]
    if not (count and took_s):
        return count, 0.0
    named = enumerate(stacked.functions)
    own = np.array([k for k, f in named if f.activity in ON_THE_CPU and f.name not in _CHECKS], np.intp)
    held_up_s = np.nansum(stacked.beta[np.ix_(ranks, own)], axis=1) * stacked.iteration_s[ranks]
    return count, min(count * float(np.median(took_s)), float(np.median(held_up_s)))


# --- threads ---------------------------------------------------------------------------------------------------------

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else float("nan")


def _cores(told: Mapping[str, object]) -> float:
    """Cores that the process may use, by the host, its affinity and its control groups; NaN = not told."""
    known = [_number(told.get(name)) for name in ("cpus", "affinity.cpus", "cgroup.cpus")]
    return min((value for value in known if value > 0), default=float("nan"))


def _threads(stacked: Stacked, context: Context, iteration_s: float) -> Iterator[Costly]:
    """More intra-op threads on a host than cores for them, and both are seen: the threads at work, the training
    threads without a core. The numbers alone are no fault: device jobs hardly use these threads.

    Wrong where the ranks of a host are bound to cores of their own and told so by nothing.
    """
    by_host: dict[str, list[int]] = {}
    for w, host in enumerate(stacked.hosts if context.settings else ()):
        by_host.setdefault(host, []).append(w)
    for host in sorted(by_host):
        rows = np.array(by_host[host], np.intp)
        told = [_of(stacked, context, int(w)) for w in rows]
        threads = np.array([_number(one.get("torch.threads")) for one in told])
        cores = np.array([_cores(one) for one in told])
        if not (np.isfinite(threads).all() and np.isfinite(cores).all()):
            continue
        if len({str(one.get("affinity")) for one in told}) == len(told) > 1:
            wanted, room = float((threads / cores).max()), 1.0  # each rank is bound to cores of its own
        else:
            wanted, room = float(threads.sum()), float(cores.max())
        if wanted <= room or float(np.median(threads)) <= 1:
            continue
        helpers = next((o for o in context.counters if o.host == host and o.name == "helper_cores"), None)
        granted, spent_s = _granted(stacked, rows)
        fair = min(float(cores.max()) / len(rows), 1.0)
        is_felt = helpers is not None and granted < CROWDED
        seconds = spent_s * max(1 - granted / fair, 0.0) if is_felt else 0.0
        variable = next((name for name in _THREAD_VARIABLES if f"env.{name}" in told[0]), "OMP_NUM_THREADS")
        given = told[0].get(f"env.{variable}")
        num = int(np.median(threads))
        name = f"{variable}={given}" if str(given) == str(num) else f"torch.set_num_threads({num})"
        because = (
            f"{len(rows)} rank{'s' if len(rows) > 1 else ''} with {num} intra-op threads each share "
            f"{float(cores.max()):g} core{'s' if cores.max() != 1 else ''} of host {host or 'unknown'} ({name})"
        )
        if helpers is not None:
            because += f"; {helpers.text}"
        if np.isfinite(granted):
            because += f"; ready to run, the training threads get a core {granted:.0%} of the time"
        share = max(int(float(cores.max()) / len(rows)), 1)
        yield Costly(
            rows,
            FunctionName("setting", name),
            because,
            {"threads": num, "ranks": len(rows), "cores": float(cores.max())},
            _worth(seconds, iteration_s),
            f"Set OMP_NUM_THREADS={share} (or torch.set_num_threads({share})): cores divided by the ranks of the host; "
            "give loader workers one thread each.",
            frozenset({"cpu_contention", "unknown", "sync_amplification", "version_change", "host_python"}),
            is_finding=is_felt,
            settings=frozenset({"torch.threads", *(f"env.{name}" for name in _THREAD_VARIABLES)}),
        )


def _granted(stacked: Stacked, rows: Indices) -> tuple[float, float]:
    """Share of the CPU time wanted that the training threads of these ranks got, NaN = not measured; and the seconds of
    an iteration in which they wanted it."""
    told, weight = grants(stacked, rows, columns_of(stacked, ON_THE_CPU))
    return mean_grant(told, weight), float(np.median(weight.sum(1) * stacked.iteration_s[rows]))


# --- reductions again and again --------------------------------------------------------------------------------------


def _rounds(stacked: Stacked, context: Context, iteration_s: float, transfer_s: Float64s) -> Iterator[Costly]:
    """Several times the gradients' bytes are reduced between two optimizer steps; once would do, after the last
    backward pass. Where the same group also reduces activations the sum is no multiple, or the model is larger than its
    gradients: then this rule is silent, or says too many rounds."""
    told = next((s for s in context.settings.values() if any(n.startswith("gradients.") for n in s)), {})
    for kind, call in (("ddp", "model.no_sync()"), ("fsdp", "model.set_requires_gradient_sync(False)")):
        num_bytes = _number(told.get(f"gradients.{kind}.num_bytes"))
        if not num_bytes > 0 or context.reduced_bytes <= 0:
            continue
        ratio = context.reduced_bytes / num_bytes
        rounds = int(ratio + WHOLE)
        if not 2 <= rounds <= MOST_ROUNDS or abs(ratio - rounds) > WHOLE * rounds:
            continue
        seconds = (rounds - 1) / rounds * float(np.median(transfer_s))
        yield Costly(
            np.arange(len(stacked), dtype=np.intp),
            FunctionName(
                "setting", f"gradient reduction on each of {rounds} micro-steps, without {call.split('.')[1]}"
            ),
            f"{context.reduced_bytes / 1e6:.3g} MB are reduced between two optimizer steps, {rounds} times the "
            f"{num_bytes / 1e6:.3g} MB of the gradients: each micro-step reduces all of them, and only the last one "
            "would need to",
            {"rounds": rounds, "reduced_bytes": context.reduced_bytes, "gradient_bytes": num_bytes},
            _worth(seconds, iteration_s),
            f"Run all micro-steps but the last one under {call}: {rounds - 1} of {rounds} reductions fall away.",
            frozenset({"fabric_contention", "nic_or_host_network"}),
            is_finding=seconds >= WORTH * iteration_s,
        )


# --- modes -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Mode:
    """A variable or switch that makes every step slower by what it is for."""

    setting: str
    """Name in the snapshot."""
    values: frozenset[str]
    """That turn it on, in lower case."""
    does: str
    advice: str
    is_finding: bool = True
    """It costs in each step, however a job is made; else only in some jobs, and it may be wanted."""

    def is_on(self, told: Mapping[str, object]) -> bool:
        """Of a rank with this snapshot."""
        return str(told.get(self.setting, "")).lower() in self.values


_ON = frozenset({"1", "true", "yes", "on", "y"})
_MODES = (
    _Mode(
        "env.TORCH_DISTRIBUTED_DEBUG",
        frozenset({"detail"}),
        "ranks compare each collective with one another before it runs, which also changes or hides errors of order",
        "Unset TORCH_DISTRIBUTED_DEBUG for production; turn it on by hand while a hang is looked for.",
    ),
    _Mode(
        "env.PYTORCH_NO_CUDA_MEMORY_CACHING",
        _ON,
        "each tensor is allocated by the driver, which waits for the device",
        "Unset PYTORCH_NO_CUDA_MEMORY_CACHING; it is for memory checkers.",
    ),
    _Mode(
        "env.PYTHONMALLOC",
        frozenset({"debug", "malloc_debug", "pymalloc_debug"}),
        "each allocation of Python is checked",
        "Unset PYTHONMALLOC.",
    ),
    _Mode(
        "env.TORCH_DISTRIBUTED_DEBUG",
        frozenset({"info"}),
        "DistributedDataParallel keeps statistics of its iterations",
        "",
        is_finding=False,
    ),
    # What it costs is seen in the traces of device jobs (`overheads`, `levels`), and others pay nothing.
    *(
        _Mode(name, _ON | {"2", "3"}, "each launch waits until its kernel is done", "It is for debugging.", False)
        for name in BLOCKING.settings
    ),
    _Mode("env.NCCL_DEBUG", frozenset({"trace"}), "NCCL logs each call", "", is_finding=False),
    _Mode("env.TORCH_NCCL_BLOCKING_WAIT", _ON, "the host waits for each collective", "", is_finding=False),
    _Mode("env.NCCL_BLOCKING_WAIT", _ON, "the host waits for each collective", "", is_finding=False),
    _Mode(
        "torch.deterministic", frozenset({"true"}), "slower kernels are chosen where only these repeat", "",
        is_finding=False,
    ),
    _Mode(
        "ddp.1.find_unused_parameters", frozenset({"true"}),
        "the graph is walked after each forward pass for parameters without a gradient", "", is_finding=False,
    ),
)  # fmt: skip


def _modes(stacked: Stacked, context: Context) -> Iterator[Costly]:
    for mode in _MODES:
        ranks = _having(stacked, context, mode.is_on)
        if not len(ranks):
            continue
        value = str(_of(stacked, context, int(ranks[0]))[mode.setting])
        name = f"{mode.setting.removeprefix('env.')}={value}"
        yield Costly(
            ranks,
            FunctionName("setting", name),
            f"{name}: {mode.does}",
            {"setting": mode.setting, "value": value},
            None,
            mode.advice,
            frozenset({"unknown", "version_change"}) if mode.is_finding else frozenset(),
            mode.is_finding,
            frozenset({mode.setting}),
        )

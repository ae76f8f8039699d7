"""eroica: which rank, which function and which cause make a distributed PyTorch job slow.

    import eroica
    traces = eroica.read_all(eroica.find_traces(["traces/"]))
    stacked = eroica.stack([eroica.summarize(trace) for trace in traces])
    diagnosis = eroica.diagnose(stacked)

In a training script the import alone arms the process, late-bound (`eroica.probe`): its ranks leave flight rings for
`eroica show`. EROICA=0 turns that off.

The public names load on first use (PEP 562), so that `import eroica` itself costs nothing: no numpy, no torch, no
asyncio. A training process imports this package, and must not pay for what only an analysis needs.
"""

from __future__ import annotations

from eroica.probe import late as _late

TYPE_CHECKING = False  # type checkers know the name; importing `typing` would be most of the cost of this module
if TYPE_CHECKING:
    from typing import Any

    from eroica.diagnosis import diagnose as diagnose
    from eroica.localization import localize as localize
    from eroica.pattern import stack as stack
    from eroica.pattern import summarize as summarize
    from eroica.trace import find_traces as find_traces
    from eroica.trace import read_all as read_all
    from eroica.trace import read_trace as read_trace

__version__ = "0.1.0"

_HOMES = {
    "diagnose": "eroica.diagnosis",
    "find_traces": "eroica.trace",
    "localize": "eroica.localization",
    "read_all": "eroica.trace",
    "read_trace": "eroica.trace",
    "stack": "eroica.pattern",
    "summarize": "eroica.pattern",
}

__all__ = ["__version__", "diagnose", "find_traces", "localize", "read_all", "read_trace", "stack", "summarize"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'eroica' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


_late.watch()

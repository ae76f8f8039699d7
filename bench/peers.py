"""The peers' own environments: HolisticTraceAnalysis with the pandas it was measured on, and orjson with msgspec.

Apart from eroica's, so that neither side's pins decide the other's speed. Made once under bench/.peers, with the user's
pip configuration; a peer that cannot be installed is left out of the tables, with the reason, and the rest is measured.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from bench.measure import ROOT, Contender, progress

PLACE = ROOT / "bench" / ".peers"
REQUIREMENTS = {
    "hta": ("HolisticTraceAnalysis==0.5.0", "pandas<3", "ijson>=3.3"),
    "json": ("orjson", "msgspec", "numpy"),
    "traceml": ("traceml-ai",),
}
"""Environment -> what pip installs. HTA 0.5.0 states no upper bound of pandas; on pandas 3 it is slower."""
_SEES_TORCH = ("traceml",)
"""They train in their own environment, with the torch of this one."""
_SHOWN = ("HolisticTraceAnalysis", "pandas", "ijson", "orjson", "msgspec", "numpy", "traceml-ai")


@dataclass(frozen=True, slots=True)
class Environment:
    """One virtual environment."""

    name: str
    python: Path
    versions: dict[str, str]
    problem: str
    """Why it is not there; "" = it is."""


def environment(name: str) -> Environment:
    """Make or find it."""
    found = _made(name)
    if name in _SEES_TORCH and not found.problem:
        torch = importlib.util.find_spec("torch")
        here = Path(torch.origin).parents[1] if torch and torch.origin else ""
        for packages in found.python.parents[1].glob("lib/python*/site-packages"):
            (packages / "torch-of-the-bench.pth").write_text(f"{here}\n")
    return found


def _made(name: str) -> Environment:
    place = PLACE / name
    python = place / "bin" / "python"
    stamp = place / "installed.json"
    wanted = list(REQUIREMENTS[name])
    try:
        told = json.loads(stamp.read_text())
        if told["wanted"] == wanted:
            return Environment(name, python, told["versions"], "")
    except (OSError, ValueError, KeyError):
        pass
    progress(f"installing {', '.join(wanted)}")
    try:
        _run(sys.executable, "-m", "venv", "--clear", str(place))
        _run(str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wanted)
        listed = json.loads(_run(str(python), "-m", "pip", "list", "--format", "json", "--disable-pip-version-check"))
    except subprocess.CalledProcessError as error:
        last = (error.stderr or "").strip().splitlines()[-1:] or [f"exit {error.returncode}"]
        return Environment(name, python, {}, f"could not be installed: {last[0]}")
    finally:
        progress("")
    numbers = {item["name"].lower(): item["version"] for item in listed}
    versions = {shown: numbers[shown.lower()] for shown in _SHOWN if shown.lower() in numbers}
    stamp.write_text(json.dumps({"wanted": wanted, "versions": versions}))
    return Environment(name, python, versions, "")


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def readers(trace: Path, hta: Environment, json_tools: Environment) -> list[Contender]:
    """Each peer that can read this trace."""
    found = []
    if not json_tools.problem:
        script = str(ROOT / "bench" / "peer_json.py")
        for method in ("msgspec", "orjson"):
            name = f"{method}, columns, gc off"
            found.append(Contender(name, (str(json_tools.python), script, method, str(trace))))
    if not hta.problem:
        script = str(ROOT / "bench" / "peer_hta.py")
        for backend, name in (("ijson", "HTA, its fastest (ijson)"), ("default", "HTA, default")):
            found.append(Contender(name, (str(hta.python), script, backend, str(trace))))
    return found

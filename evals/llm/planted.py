"""Planted repositories: small trainings with one software fault each, and near misses that no codemod may touch.

They lie in `repos/` and `near_misses/` as other people write them, with their own tests, and were written by somebody
who had not read how the codemods find their places. `planted.toml` tells what is wrong, how to train, and what a
finding about it says, for those who have no time to train.
"""

from __future__ import annotations

import shutil
import subprocess
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eroica.findings import Diagnosis, from_json

HERE = Path(__file__).parent
RANKS = 2


@dataclass(frozen=True, slots=True)
class Planted:
    """One repository."""

    name: str
    folder: Path
    about: str
    train: Sequence[str]
    """Script and arguments, the last of which is how many steps; () for a near miss."""
    finding: Mapping[str, Any]
    is_hang: bool

    def training(self, times: int = 1) -> list[str]:
        """Words that train here, `times` as long."""
        *words, steps = self.train
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        return [*launcher, *words, str(int(steps) * times)]

    def checkout(self, parent: Path) -> Path:
        """A git repository of it below `parent`, with a remote beside it, called owner/NAME."""
        remote, here = parent / "owner" / f"{self.name}.git", parent / self.name
        shutil.copytree(self.folder, here, ignore=shutil.ignore_patterns("planted.toml", "__pycache__"))
        (here / ".gitignore").write_text("__pycache__/\n.pytest_cache/\n")
        git = ["git", "-c", "init.defaultBranch=main"]
        subprocess.run([*git, "init", "--quiet", "--bare", str(remote)], check=True)
        for words in (
            ["init", "--quiet"], ["config", "user.name", "Somebody"], ["config", "user.email", "somebody@example.com"],
            ["add", "."], ["commit", "--quiet", "--message", "Train"], ["remote", "add", "origin", str(remote)],
            ["push", "--quiet", "origin", "main"],
        ):  # fmt: skip
            subprocess.run([*git, *words], cwd=here, check=True)
        return here

    def diagnosis(self) -> Diagnosis:
        """What a finding about the fault says, made by hand: for who does not train."""
        told = dict(self.finding)
        lines = (self.folder / told["file"]).read_text().splitlines()
        line = next(number for number, text in enumerate(lines, 1) if told["line"] in text)
        place = f"/app/{told['file']}:{line}"
        ranks, scope = told.get("ranks", "0-1"), told.get("scope", "all")
        finding = {
            "id": "F1", "cause": told["cause"], "scope": scope, "ranks": ranks, "hosts": ["node-1"],
            "device": None, "link": None, "distance": None, "delta": None, "steps": told.get("steps", "stable"),
            "function": {"kind": told["kind"], "name": told["name"], "location": place, "user_location": place,
                         "user_function": told["function"]},
            "impact": {"seconds_per_iteration": 0.01, "share": 0.3, "method": "ledger"},
            "confidence": "established", "evidence": ["E1"], "ruled_out": [], "advice": "",
        }  # fmt: skip
        return from_json(
            {
                "schema": "eroica.diagnosis/1", "job": self.name, "created": "2026-01-02T03:04:05Z",
                "kind": "hang" if self.is_hang else "slow",
                "coverage": {"ranks_expected": RANKS, "ranks_reported": RANKS, "missing_ranks": "",
                             "partial_ranks": "", "explained_share": 0.9, "notes": []},
                "environment": {"common": {"cpus": 2}}, "placement": {"hosts": {"node-1": "0-1"}},
                "verdict": {"scope": scope, "cause": told["cause"], "ranks": ranks, "hosts": ["node-1"],
                            "confidence": "established", "summary": self.about},
                "findings": [finding],
                "consequences": [],
                "evidence": {"E1": {"text": f"{told['function']} ({place[1:]})", "source": "pattern",
                                    "values": told.get("values", {})}},
            }
        )  # fmt: skip


def planted(kind: str = "repos") -> list[Planted]:
    """All of `repos` or of `near_misses`."""
    found = []
    for file in sorted((HERE / kind).glob("*/planted.toml")):
        told = tomllib.loads(file.read_text())
        found.append(
            Planted(
                name=file.parent.name,
                folder=file.parent,
                about=told["about"],
                train=tuple(told.get("train", ())),
                finding=told["finding"],
                is_hang=told.get("is_hang", False),
            )
        )
    return found

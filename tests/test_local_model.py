"""A real model, small and on this host, in place of the scripted one: what it says has the right shape, wise or not.

Part of `make test-full`, which installs it. It calls no tools, reads badly and quotes nothing rightly; that is what it
is here for.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import samples
from tests.mcp_talk import save
from tests.test_fix import git, state
from tests.test_fix_model import prepared

ROOT = Path(__file__).parent.parent
KEY = "sk-of-somebody-0123456789abcdef"
LIMIT_S = 280
"""For all that a command takes. A question is some 1,800 tokens to read and 200 to write, half a minute of one core; a
patch is written until the context is full, two minutes and a half."""

pytestmark = pytest.mark.full


@contextmanager
def _serving(folder: Path, *words: str) -> Iterator[str]:
    """The model's endpoint."""
    said = folder / "stderr.txt"
    with (
        said.open("w") as log,
        subprocess.Popen(
            [sys.executable, "-m", "tests.local_model", *words],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT,
        ) as server,
    ):  # fmt: skip
        try:
            assert server.stdout is not None
            address = server.stdout.readline().strip()
            assert address.startswith("http://127.0.0.1:"), f"make test-full installs it: {said.read_text()[-600:]}"
            yield f"{address}/v1"
        finally:
            server.kill()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with _serving(tmp_path_factory.mktemp("model")) as address:
        yield address


def _run(url: str, *words: str) -> subprocess.CompletedProcess[str]:
    """`eroica`, as a program, without a terminal."""
    done = subprocess.run(
        [sys.executable, "-m", "eroica", *words, "--model", "smollm2"],
        env=os.environ | {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": KEY, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    print(done.stdout, done.stderr, sep="\n")  # shown if the test fails
    assert "Traceback" not in done.stdout + done.stderr
    assert KEY not in done.stdout + done.stderr
    return done


def _files(folder: Path) -> Mapping[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_a_small_model_answers_within_limits_is_marked_and_starts_nothing(url: str, tmp_path: Path) -> None:
    save(tmp_path, samples.slow_input()[0])
    before = _files(tmp_path)
    limits = ["--calls", "2", "--tokens", "12000"]
    done = _run(url, "chat", "Which rank is slow, and why?", "--in", str(tmp_path), "--allow-act", *limits)
    assert done.returncode == 0
    asking, told = done.stderr.splitlines()
    assert asking == f"eroica: asking smollm2 at {url}"
    counts = re.fullmatch(
        r"eroica: (\d) calls of the model, (\d) of tools, ([\d,]+) tokens; "
        r"(?:each claim cites evidence that was shown, .*|(\d+) sentences? not borne out by the evidence marked)",
        told,
    )
    assert counts is not None
    assert 1 <= int(counts[1]) <= 2
    assert int(counts[2]) <= 4
    assert 1_000 < int(counts[3].replace(",", "")) <= 12_000
    assert done.stdout.strip()
    marks = re.findall(r"\[[^][]*(?:cite|evidence|shown|looked at)[^][]*\]", done.stdout)
    assert len(marks) == int(counts[4] or 0)
    assert _files(tmp_path) == before


def test_a_patch_asked_of_a_small_model_ends_in_a_sentence_and_leaves_nothing_behind(url: str, tmp_path: Path) -> None:
    checkout, file = prepared(tmp_path)
    number = str(json.loads(file.read_text())["id"])
    file.rename(tmp_path / f"diagnosis-{number}.json")
    before, files = state(checkout), _files(checkout / "src")
    compiles = f"{sys.executable} -m compileall -q src"
    done = _run(url, "fix", number, "--in", str(tmp_path), "--repo", str(checkout), "--test", compiles)
    branches, trees, changed = state(checkout)
    assert (trees, changed) == before[1:]
    assert _files(checkout / "src") == files
    assert git(checkout, "rev-parse", "HEAD") == git(checkout, "rev-parse", "main")
    said = done.stderr.splitlines()
    assert any(line.endswith(f"asking smollm2 at {url} for a change of src/train.py") for line in said)
    if done.returncode == 0:  # it stood all gates: one branch, and what it holds is shown
        (branch,) = git(checkout, "branch", "--list", "eroica/*").split()
        assert "smollm2 wrote this patch, and nothing proves that it fits" in done.stdout
        assert git(checkout, "diff", "--name-only", "main", branch) == "src/train.py"
        return
    assert done.returncode == 1
    assert not done.stdout
    assert branches == before[0]
    outcomes = ["proposed no change that can be made: ", "sees no change to make: ", "the tests fail with the patch"]
    outcomes += ["does not answer: Error code: 400"]  # its own answers, which find no end, have filled its context
    assert any(outcome in said[-1] for outcome in outcomes)

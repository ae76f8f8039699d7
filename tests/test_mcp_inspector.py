"""The MCP server asked by a client of other people's making: the Inspector's command line, over both transports.

Part of `make test-full`, which installs it with npm; EROICA_INSPECTOR names another installation.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests import samples
from tests.mcp_talk import save, small_job
from tests.test_mcp_web import running
from tests.test_serve import TIMEOUT_S, ask, coordinator, environment, wait_for

ROOT = Path(__file__).parent.parent
INSPECTOR = Path(os.environ.get("EROICA_INSPECTOR", Path(sys.prefix) / "inspector")) / "node_modules/.bin/mcp-inspector"
Record = dict[str, Any]

pytestmark = pytest.mark.full


def _asked(target: list[str], *request: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(INSPECTOR), "--cli", *target, *request], capture_output=True, text=True, timeout=120, check=False, cwd=ROOT
    )


def _answer(target: list[str], *request: str) -> dict[str, Any]:
    done = _asked(target, *request)
    assert done.returncode == 0, done.stderr
    plain = json.loads(done.stdout)
    assert isinstance(plain, dict)
    return plain


def test_the_inspector_calls_every_tool_over_standard_input_and_output(tmp_path: Path) -> None:
    id = save(tmp_path, samples.slow_input()[0])
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "data.py").write_text("raw = 1\n" * 60)
    target = [sys.executable, "-m", "mcp_server", str(tmp_path), "--allow-act", "--source", str(tmp_path)]
    tools = [tool["name"] for tool in _answer(target, "--method", "tools/list")["tools"]]
    needs = {"job_status": ["job=llama-8b-pretrain"], "diagnose_traces": ["path=none"], "trigger_profile": ["job=none"]}
    for tool in tools:
        arguments = [part for pair in needs.get(tool, []) for part in ("--tool-arg", pair)]
        done = _asked(target, "--method", "tools/call", "--tool-name", tool, *arguments)
        assert "Traceback" not in done.stderr
        is_refused = tool in ("diagnose_traces", "trigger_profile")  # nothing is there to be acted on
        assert ('"isError": true' in done.stdout) is is_refused, (tool, done.stdout, done.stderr)
        assert is_refused or id in done.stdout, tool
    prompts = [one["name"] for one in _answer(target, "--method", "prompts/list")["prompts"]]
    assert prompts == ["triage", "fix", "postmortem"]
    fix = _answer(target, "--method", "prompts/get", "--prompt-name", "fix")
    assert "raw = 1" in fix["messages"][0]["content"]["text"]
    assert _answer(target, "--method", "resources/list")["resources"]


def test_the_inspector_needs_a_token_over_http(tmp_path: Path) -> None:
    small_job(tmp_path / "out" / "run7")
    with running(tmp_path, "--allow-act", "--jobs", "1") as site:
        bare = [site.url, "--transport", "http"]
        refused = _asked(bare, "--method", "tools/list")
        assert refused.returncode != 0
        assert "auth_required" in refused.stderr, "that is what it makes of a 401"
        target = [*bare, "--header", f"Authorization: Bearer {site.act}"]
        request = ["--method", "tools/call", "--tool-name", "diagnose_traces", "--tool-arg", "path=run7"]
        record = _answer(target, *request)["structuredContent"]
        assert record["state"] == "done"
        request = ["--method", "tools/call", "--tool-name", "get_diagnosis", "--tool-arg", f"id={record['diagnosis']}"]
        assert _answer(target, *request)["structuredContent"]["findings"][0]["cause"] == "input_pipeline"


@pytest.mark.e2e
def test_the_inspector_finds_out_about_a_demo_that_runs(tmp_path: Path) -> None:
    demos = ROOT / "eroica" / "demos"
    training = [str(demos / "train.py"), "--out", str(tmp_path), "--fault", "slow_input", "--culprit", "2"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", *training]
    launcher += ["--steps", "20000"]
    with coordinator(tmp_path, "--job", "waves"):
        job = subprocess.Popen(
            [sys.executable, "-m", "eroica", "run", "--out", str(tmp_path / "run"), "--", *launcher],
            env=environment(tmp_path, "a") | {"EROICA_COORDINATOR": str(tmp_path / "state" / "waves.pass")},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=tmp_path,
        )
        try:
            wait_for(lambda: "slow: rank 2" in ask(tmp_path, "incidents").stdout, "an incident", 120.0)
            found = _told_of_the_demo(tmp_path, demos)
        finally:
            job.terminate()
            job.wait(TIMEOUT_S)
    window, diagnosis, source, fix, pacing = found
    assert window["state"] == "done"
    assert diagnosis["verdict"].startswith("rank 2: input pipeline in __getitem__ (train.py:")
    assert "time.sleep(self.delay_s)" in json.dumps(source)
    assert "time.sleep(self.delay_s)" in fix and "__getitem__" in fix
    assert pacing["mode"] == "dry-run"


def _told_of_the_demo(
    home: Path, demos: Path
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any], str, dict[str, Any]]:
    """A window from its start to its end, its diagnosis, the lines of the source, the prompt for a fix, and pacing."""
    with running(home, "--source", str(demos), over=home / "state" / "read.token") as site:
        target = [site.url, "--transport", "http", "--header", f"Authorization: Bearer {site.act}"]
        tools = {tool["name"] for tool in _answer(target, "--method", "tools/list")["tools"]}
        assert "get_pacing" in tools and not tools & {"trigger_profile", "set_pacing", "diagnose_traces", "suggest_fix"}
    with running(home, "--source", str(demos), "--allow-act", over=home / "state" / "act.token") as site:
        assert _asked([site.url, "--transport", "http"], "--method", "tools/list").returncode != 0
        target = [site.url, "--transport", "http", "--header", f"Authorization: Bearer {site.act}"]

        def called(tool: str, **arguments: str) -> dict[str, Any]:
            words = [word for name, value in arguments.items() for word in ("--tool-arg", f"{name}={value}")]
            record = _answer(target, "--method", "tools/call", "--tool-name", tool, *words)["structuredContent"]
            assert isinstance(record, dict)
            return record

        window = called("trigger_profile", job="waves")
        until = time.monotonic() + TIMEOUT_S
        while window["state"] not in ("done", "failed", "cancelled"):
            assert time.monotonic() < until, window
            window = called("trigger_profile", job="waves", action="poll")
        id = str(window["diagnosis"])
        diagnosis, source = called("get_diagnosis", id=id), called("get_source", id=id)
        prompt = _answer(target, "--method", "prompts/get", "--prompt-name", "fix", "--prompt-args", f"id={id}")
        pacing = called("set_pacing", job="waves", mode="dry-run")
    return window, diagnosis, source, prompt["messages"][0]["content"]["text"], pacing

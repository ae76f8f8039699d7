"""The MCP server asked by a client of other people's making: the Inspector's command line, over both transports.

Part of `make test-full`, which installs it with npm; EROICA_INSPECTOR names another installation.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import samples
from tests.mcp_talk import save, small_job
from tests.test_mcp_web import running

ROOT = Path(__file__).parent.parent
INSPECTOR = Path(os.environ.get("EROICA_INSPECTOR", Path(sys.prefix) / "inspector")) / "node_modules/.bin/mcp-inspector"

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

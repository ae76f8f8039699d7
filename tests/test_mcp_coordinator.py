"""The MCP server over a running coordinator: what it tells, windows that are asked for, and one that is dead."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]
from mcp import Client
from mcp.client import ClientRequestContext
from mcp.types import CallToolResult, ElicitRequestParams, ElicitResult

from eroica.errors import DataError
from eroica.findings import detail_to_json
from eroica.guard import Limits, Rate, Web
from mcp_server.coordinator import CoordinatorSource, detail_from
from mcp_server.reader import Setup
from tests import samples
from tests.mcp_talk import ask, text_of
from tests.site import JOB, Site


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    fast = Rate(1e6, 1e6)
    made = Site(tmp_path, web=Web(limits=Limits(reads=fast, acts=fast))).start()
    yield made
    made.close()


def _setup(site: Site, token: str = "act") -> Setup:
    # Each look at the clock is minutes after the one before: no list is good any more.
    source = CoordinatorSource(site.client(token), count(0.0, 100.0).__next__)
    return Setup(source=source, windows=source.windows, client=source.client, allow_act=True)


async def _record(client: Client, tool: str, **arguments: Any) -> dict[str, Any]:
    result = await client.call_tool(tool, arguments)
    assert not result.is_error, text_of(result)
    record = result.structured_content
    assert isinstance(record, dict)
    return record


async def _profiled(client: Client) -> dict[str, Any]:
    """A window from its start to its end."""
    record = await _record(client, "trigger_profile", job=JOB)
    with anyio.fail_after(30):
        while record["state"] not in ("done", "failed", "cancelled"):
            await anyio.sleep(0.02)
            record = await _record(client, "trigger_profile", job=JOB, action="poll")
    return record


def test_all_tools_that_there_are_leave_room_for_a_conversation(site: Site) -> None:
    tools = ask(_setup(site), lambda client: client.list_tools()).tools
    assert {"get_pacing", "set_pacing", "trigger_profile"} <= {tool.name for tool in tools}
    assert len(tools) <= 15
    told = [{"name": tool.name, "description": tool.description, "parameters": tool.input_schema} for tool in tools]
    assert len(json.dumps(told)) / 3.5 < 3_000
    for tool in tools:
        Draft202012Validator.check_schema(tool.input_schema)


def test_a_running_job_is_profiled_and_its_diagnosis_told_with_the_numbers_of_its_ranks(site: Site) -> None:
    async def question(client: Client) -> None:
        (job,) = (await _record(client, "list_jobs"))["jobs"]
        assert job["standing"][0] == "running: 8 of 8 ranks on 2 hosts, 117 iterations"
        window = await _profiled(client)
        assert window["state"] == "done"
        site.kept()
        diagnosis = await _record(client, "get_diagnosis", id=window["diagnosis"])
        assert diagnosis["verdict"].startswith("rank 5: input pipeline in __getitem__")
        workers = await _record(client, "compare_workers", id=window["diagnosis"])
        assert any(row["ranks"] == "5" and row["in_a_finding"] for row in workers["workers"])
        status = await _record(client, "job_status", job=JOB)
        assert [row["id"] for row in status["diagnoses"]] == [window["diagnosis"]]
        site.client().confirm(window["diagnosis"], "checkpoint_io", "the NFS server")
        again = await _profiled(client)
        site.kept()
        incidents = (await _record(client, "list_incidents"))["incidents"]
        assert [row["seen_before"] for row in incidents] == [1, 0]
        assert incidents[1]["confirmed"] == "checkpoint_io: the NFS server"
        assert incidents[0]["id"] == again["diagnosis"]

    ask(_setup(site), question)


def test_a_diagnosis_is_found_by_its_whole_id_also_where_the_id_of_another_goes_on_from_it(site: Site) -> None:
    async def question(client: Client) -> None:
        first, second = [(await _profiled(client))["diagnosis"] for _ in range(2)]
        site.kept()
        assert second == f"{first}-2", "the same was found once more"
        for id in (first, second):
            assert (await _record(client, "get_diagnosis", id=id))["id"] == id
        part = await client.call_tool("get_diagnosis", {"id": first[:6]})
        assert part.is_error and "give more of it" in text_of(part)

    ask(_setup(site), question)


def test_a_diagnosis_that_is_no_longer_among_the_newest_is_found_by_its_id_with_or_without_a_number(site: Site) -> None:
    site.client().start_window(JOB)
    site.wait(lambda: bool(site.incidents), "a diagnosis")
    (incident,) = site.incidents
    for minute in range(60):
        made = replace(incident.diagnosis, created=f"2026-11-03T10:{minute:02}:00Z")
        site.in_loop(partial(site.chronicle.told, JOB, replace(incident, diagnosis=made)))
    site.kept()

    async def question(client: Client) -> None:
        newest = (await _record(client, "get_diagnosis"))["id"]
        content = newest.partition("-")[0]
        assert newest == f"{content}-61"
        for id, created in ((content, incident.diagnosis.created), (f"{content}-2", "2026-11-03T10:00:00Z")):
            record = await _record(client, "get_diagnosis", id=id)
            assert (record["id"], record["created"]) == (id, created)

    ask(_setup(site), question)


def test_asking_again_gives_the_window_that_is_under_way_and_it_can_be_left(site: Site) -> None:
    for agent in site.agents:
        agent.is_quiet = True

    async def question(client: Client) -> None:
        windows = [await _record(client, "trigger_profile", job=JOB) for _ in range(3)]
        assert len({window["window"] for window in windows}) == 1
        left = await _record(client, "trigger_profile", job=JOB, action="cancel")
        assert left["state"] == "cancelled"
        other = await _record(client, "trigger_profile", job=JOB)
        assert other["window"] != windows[0]["window"]

    ask(_setup(site), question)


def test_each_window_is_asked_about_also_where_nobody_looked_how_the_last_one_ended(site: Site) -> None:
    questions: list[str] = []

    async def elicit(context: ClientRequestContext, params: ElicitRequestParams) -> ElicitResult:
        questions.append(params.message)
        return ElicitResult(action="accept", content={"go_ahead": True})

    async def question(client: Client) -> None:
        refused = await client.call_tool("trigger_profile", {"job": "tides"})
        assert refused.is_error
        await client.call_tool("trigger_profile", {"job": "tides"})
        first = await _record(client, "trigger_profile", job=JOB)
        site.wait(lambda: site.client().window(JOB, first["window"]).is_over, "a window")
        second = await _record(client, "trigger_profile", job=JOB)
        assert second["window"] != first["window"]

    ask(_setup(site), question, elicitation_callback=elicit)
    assert [JOB in text for text in questions] == [False, False, True, True]


def test_a_token_that_may_only_read_starts_nothing(site: Site) -> None:
    async def question(client: Client) -> CallToolResult:
        return await client.call_tool("trigger_profile", {"job": JOB})

    result = ask(_setup(site, "read"), question)
    assert result.is_error
    assert "act" in text_of(result)


def test_an_unknown_job_is_the_coordinators_own_sentence(site: Site) -> None:
    async def question(client: Client) -> CallToolResult:
        return await client.call_tool("trigger_profile", {"job": "tides"})

    assert "no job tides is running here" in text_of(ask(_setup(site), question))


def test_a_dead_coordinator_is_a_sentence_and_no_hang(site: Site) -> None:
    setup = _setup(site)
    url = site.client().url
    site.server.close()

    async def question(client: Client) -> list[str]:
        said = []
        with anyio.fail_after(30):
            for tool in ("list_jobs", "get_diagnosis", "list_incidents"):
                result = await client.call_tool(tool, {})
                assert result.is_error
                said.append(text_of(result))
        return said

    for text in ask(setup, question):
        assert f"nobody answers at {url}" in text


def test_numbers_come_back_from_their_json_as_they_were() -> None:
    for _, detail in (samples.slow_input(), samples.partial(), samples.rotating_gc()):
        plain = detail_to_json(detail)
        again = detail_from(plain)
        assert again.functions == detail.functions
        assert again.group_ranks == detail.group_ranks
        np.testing.assert_allclose(again.beta, detail.beta, rtol=1e-5)
        np.testing.assert_allclose(again.transfer_s, detail.transfer_s, rtol=1e-5)
        assert again.own_by_step_s.shape == detail.own_by_step_s.shape
        for name in ("ranks", "beta", "hosts", "groups"):
            with pytest.raises(DataError):
                detail_from({**plain, name: [["x"]]})


def test_pacing_is_told_and_enabled_only_after_a_dry_run_has_seen_the_job(site: Site) -> None:
    async def question(client: Client) -> None:
        names = {tool.name for tool in (await client.list_tools()).tools}
        assert {"get_pacing", "set_pacing"} <= names and len(names) <= 15
        assert (await _record(client, "get_pacing", job=JOB))["mode"] == "off"
        early = await client.call_tool("set_pacing", {"job": JOB, "mode": "enable"})
        assert early.is_error and "dry run" in text_of(early)
        record = await _record(client, "set_pacing", job=JOB, mode="dry-run", max_hold_ms=20)
        assert (record["mode"], record["max_hold_ms"], record["is_held"]) == ("dry-run", 20.0, False)
        beyond = await client.call_tool("set_pacing", {"job": JOB, "mode": "dry-run", "max_hold_ms": 5_000})
        assert beyond.is_error
        conductor = site.coordinators.jobs[JOB].pacing
        site.in_loop(lambda: setattr(conductor, "has_rehearsed", True))
        assert (await _record(client, "set_pacing", job=JOB, mode="enable"))["mode"] == "enable"
        assert (await _record(client, "set_pacing", job=JOB, mode="off"))["changes"][0]["why"] == "switched off by act"

    ask(_setup(site), question)


def test_a_token_that_may_only_read_switches_no_pacing(site: Site) -> None:
    async def question(client: Client) -> CallToolResult:
        assert (await _record(client, "get_pacing", job=JOB))["mode"] == "off"
        return await client.call_tool("set_pacing", {"job": JOB, "mode": "dry-run"})

    assert "scope act" in text_of(ask(_setup(site, "read"), question))

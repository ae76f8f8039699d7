"""A job of 1,024 ranks and 500 functions, with names as long and as hostile as they get: every answer stays within its
budget; many calls at once, calls that are given up, and a source that never answers hang nothing."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mcp import Client

from eroica.findings import Consequence, Detail, Diagnosis, Evidence, FunctionName
from mcp_server.answers import DEFAULT_TOKENS, LEAST_TOKENS, MOST_TOKENS, fitted
from mcp_server.reader import Setup
from mcp_server.server import build
from mcp_server.sources import Made, Seen, seen
from tests import samples
from tests.mcp_talk import ask, prompt_text, resource_text, text_of, tokens_of

TOOLS: dict[str, dict[str, Any]] = {
    "list_jobs": {}, "job_status": {"job": "big"}, "get_diagnosis": {}, "explain_finding": {}, "compare_workers": {},
    "get_collectives": {}, "get_stacks": {}, "get_source": {}, "list_incidents": {"with_healthy": True},
    "suggest_fix": {},
}  # fmt: skip


PAGED = {"get_diagnosis", "explain_finding", "get_collectives", "get_stacks", "list_incidents"}
NAMES = {
    "ordinary": "ordinary_name",
    "three bytes a letter": "関数の名前 " * 60,
    "invisible": "\x1b]0;\u202e" * 100,
    "escaped in JSON": '"\\' * 200,
}

QUICK = ("three bytes a letter",)


def _big(long: str) -> tuple[Diagnosis, Detail]:
    """`long` stands in all that a job can name."""
    diagnosis, detail = samples.throttled_gpu(1024, num_functions=500)
    functions = tuple(
        FunctionName(one.kind, f"{one.name} {long}", f"{long}/data.py:{n}", f"pack/train.py:{n + 1}", long)
        for n, one in enumerate(detail.functions)
    )
    groups = tuple(f"all_reduce in {long} {n}" for n in range(300))
    detail = replace(
        detail,
        functions=functions,
        hosts=tuple(f"{host}.{long}" for host in detail.hosts),
        groups=groups,
        group_ranks=tuple(",".join(str(rank) for rank in range(n % 2, 1024, 2)) for n in range(300)),
        group_transfer_s=np.linspace(0.001, 0.01, 300),
        group_wait_s=np.linspace(0.002, 0.05, 300),
    )
    evidence = {f"E{n}": Evidence(f"{long} {n}", "ledger", {f"{long}{m}": long for m in range(20)}) for n in range(100)}
    evidence |= {
        f"E{n}": Evidence(f"{n},{','.join(map(str, range(400, 1024, 2)))}: {long} <- {long}", "stack", {})
        for n in range(100, 200)
    }
    findings = tuple(
        replace(
            diagnosis.findings[0], id=f"F{n}", function=functions[n], evidence=tuple(evidence), advice=long * 3,
            ranks=",".join(str(rank) for rank in range(0, 1024, 2)), hosts=tuple(f"{long}{m}" for m in range(128)),
            ruled_out=(long,) * 50,
        )
        for n in range(1, 80)
    )  # fmt: skip
    return (
        replace(
            diagnosis,
            id="a" * 12,
            job="big",
            findings=findings,
            evidence=evidence,
            consequences=(Consequence("0-1023", long, long),) * 100,
            environment={f"{long}{n}": long for n in range(300)},
            verdict=replace(diagnosis.verdict, summary=long * 4),
            coverage=replace(diagnosis.coverage, notes=(long,) * 200),
        ),
        detail,
    )


def _setup(tmp_path: Path, diagnosis: Diagnosis, detail: Detail | None) -> Setup:
    made = Made()
    for number in range(60):
        made.add((replace(diagnosis, id=f"{number:02d}" + "b" * 10, created=f"2024-{number:02d}"), None))
    made.add((diagnosis, detail))
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "train.py").write_text("x = 1  # a line of source, repeated many times over\n" * 500)
    return Setup(source=made, sources=(tmp_path,), allow_act=True)


@pytest.mark.parametrize(
    "long",
    [pytest.param(long, id=name, marks=() if name in QUICK else pytest.mark.slow) for name, long in NAMES.items()],
)
def test_every_answer_about_a_thousand_ranks_is_within_its_budget(tmp_path: Path, long: str) -> None:
    setup = _setup(tmp_path, *_big(long))

    async def question(client: Client) -> None:
        for tool, arguments in TOOLS.items():
            least = 1_500 if tool == "suggest_fix" else LEAST_TOKENS
            for tokens in (None, least, MOST_TOKENS):
                given_tokens = {} if tokens is None else {"tokens": tokens}
                result = await client.call_tool(tool, {**arguments, **given_tokens})
                assert not result.is_error, (tool, text_of(result))
                assert tokens_of(result) <= given_tokens.get("tokens", DEFAULT_TOKENS), tool
                if tool in PAGED and tokens is None:
                    assert result.structured_content["left_out"], tool
        for resource in ("eroica://diagnoses", "eroica://incidents", "eroica://diagnoses/" + "a" * 12):
            text = await resource_text(client, resource)
            assert len(text.encode()) / 3.5 < 25_000
        for prompt in ("triage", "fix", "postmortem"):
            assert len((await prompt_text(client, prompt)).encode()) / 3.5 < 25_000

    ask(setup, question)


def test_cursors_lead_through_all_of_a_list_once(tmp_path: Path) -> None:
    setup = _setup(tmp_path, *_big("name"))

    async def question(client: Client) -> None:
        for tool, rows, total in (
            ("get_collectives", "collectives", 300),
            ("get_stacks", "places", 100),
            ("list_incidents", "incidents", 61),
        ):
            found, cursor = [], ""
            for _ in range(200):
                record = (await client.call_tool(tool, {"cursor": cursor})).structured_content
                found += [str(row) for row in record[rows]]
                cursor = record["cursor"]
                if not cursor:
                    break
            assert len(found) == total, tool
            assert len(set(found)) == total, tool

    ask(setup, question)


def test_named_ranks_are_compared_with_their_peers(tmp_path: Path) -> None:
    setup = _setup(tmp_path, *_big("name"))
    record = ask(setup, lambda client: client.call_tool("compare_workers", {"ranks": "5,7"})).structured_content
    rows = {row["ranks"]: row for row in record["workers"]}
    assert rows["5"]["own_ms"] > 1.3 * rows["7"]["own_ms"]
    assert len(rows) == 3
    assert record["functions"][0]["share"] is not None


class _Slow:
    """A source whose disk does not answer until it is told to."""

    what = "a slow disk"

    def __init__(self, diagnosis: Diagnosis) -> None:
        self.go_on = threading.Event()
        self.num_waiting = 0
        self._diagnosis = diagnosis

    def diagnoses(self) -> list[Diagnosis]:
        self.num_waiting += 1
        self.go_on.wait(60)
        return [self._diagnosis]

    def one(self, id: str) -> Diagnosis | None:
        return None

    def detail(self, id: str) -> Detail | None:
        return None

    def incidents(self) -> list[Seen]:
        return [seen(self._diagnosis)]

    def jobs(self) -> Mapping[str, Sequence[str]]:
        return {}

    def version(self) -> str:
        return ""


def test_fifty_calls_at_once_are_all_answered(tmp_path: Path) -> None:
    setup = _setup(tmp_path, *_big("name"))
    answered: list[str] = []

    async def question(client: Client) -> None:
        async def one(tool: str) -> None:
            result = await client.call_tool(tool, TOOLS[tool])
            assert not result.is_error
            answered.append(tool)

        with anyio.fail_after(60):
            async with anyio.create_task_group() as group:
                for number in range(50):
                    group.start_soon(one, list(TOOLS)[number % len(TOOLS)])

    ask(setup, question)
    assert len(answered) == 50


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_calls_that_are_given_up_end_at_once_and_the_server_goes_on(tmp_path: Path, mode: str) -> None:
    source = _Slow(samples.healthy()[0])

    async def talk() -> None:
        async with Client(build(Setup(source=source)), mode=mode) as client:
            with anyio.fail_after(30):
                async with anyio.create_task_group() as group:
                    for _ in range(5):
                        group.start_soon(client.call_tool, "get_diagnosis", {})
                    while source.num_waiting < 5:
                        await anyio.sleep(0.01)
                    group.cancel_scope.cancel()
                assert (await client.list_tools()).tools
                source.go_on.set()
                assert not (await client.call_tool("get_diagnosis", {})).is_error

    anyio.run(talk)


@given(st.text(max_size=3_000), st.lists(st.text(max_size=400), max_size=60), st.integers(LEAST_TOKENS, 3_000))
def test_whatever_a_job_is_called_an_answer_fits(name: str, texts: list[str], tokens: int) -> None:
    from mcp_server import reading

    diagnosis, detail = samples.slow_input()
    diagnosis = replace(
        diagnosis,
        job=name,
        evidence={f"E{n}": Evidence(text, name, {name: text}) for n, text in enumerate(texts)},
        verdict=replace(diagnosis.verdict, summary=name),
    )
    answer = reading.diagnosis(diagnosis, detail)
    assert tokens_of(fitted(answer, tokens)) <= tokens

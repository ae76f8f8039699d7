"""`eroica chat`: what a model says is checked, what it starts is asked for, and without one the diagnosis answers."""

from __future__ import annotations

import asyncio
import io
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eroica.assist import endpoints, grounding
from eroica.assist.answering import answer, topics
from eroica.assist.conversing import Conversation, Limits, Reply
from eroica.assist.toolbox import Toolbox, opened
from eroica.cli import main
from eroica.errors import EroicaError, UnavailableError, UserError
from evals.llm.endpoint import Asked, Call, Fail, Model, Say, Serving, Stall, script, serving
from mcp_server.reader import Setup
from mcp_server.server import build
from tests import samples
from tests.mcp_talk import over, save, small_job

EXPLAIN = ("explain_finding", {"id": "latest", "finding": "F1"})
GOOD = "Rank 3 is slow: its own time is 239 ms per iteration (E1)."


def _never(question: str) -> bool:
    raise AssertionError(f"nobody should be asked: {question}")


def _ask(
    setup: Setup,
    model: Model,
    question: str = "why?",
    ask: Callable[[str], bool] = _never,
    limits: Limits | None = None,
    draft: Callable[[str], None] = lambda text: None,
) -> tuple[Reply, Toolbox, Serving]:
    """One question to a scripted model, with the server in this process."""

    async def talk(at: Serving) -> tuple[Reply, Toolbox, Serving]:
        async with opened(build(setup), ask) as box:
            endpoint = endpoints.Endpoint("openai", "scripted", at.url)
            return await Conversation(endpoint, box, limits).ask(question, draft), box, at

    with serving(model) as at:
        return asyncio.run(talk(at))


def test_what_the_tools_have_not_shown_is_marked_in_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent.parent))  # as an installed package is found
    save(tmp_path, samples.slow_input()[0])
    with serving(script(Call([EXPLAIN]), Say(f"{GOOD} Rank 5 is broken (E1). Restart node-77."))) as at:
        monkeypatch.setenv("OPENAI_BASE_URL", at.url)
        assert main(["chat", "why is it slow?", "--in", str(tmp_path), "--model", "scripted"]) == 0
    told = capsys.readouterr()
    assert told.out == (
        f"{GOOD} Rank 5 is broken (E1). [rank 5 is not in the evidence cited] "
        "Restart node-77. [node-77 was not shown; 77 is not in the evidence cited]\n"
    )
    assert "2 sentences not borne out by the evidence marked" in told.err
    assert [one.body["stream"] for one in at.asked] == [True, True]
    assert "own time of rank 3 is 239 ms" in at.asked[0].text  # the verdict is there before the model is asked
    assert "trigger_profile" not in at.asked[0].tools


def test_without_a_model_the_diagnosis_answers_and_nothing_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent.parent))
    save(tmp_path, samples.slow_input()[0])
    with serving(script(Say("no"))) as at:
        monkeypatch.setenv("OPENAI_BASE_URL", at.url)  # an endpoint alone is no consent
        monkeypatch.setenv("OPENAI_API_KEY", "sk-of-another-program-1234567890")
        monkeypatch.delenv("EROICA_MODEL", raising=False)
        monkeypatch.setattr(sys, "stdin", io.StringIO("who is it?\nwhat should I do?\n\nwhy?\n"))
        assert main(["chat", "--in", str(tmp_path)]) == 0
    told = capsys.readouterr()
    assert not at.asked
    assert "no model is asked" in told.err
    assert "who          rank 3 on gpu-node-00 (E1, E2, E3)\n" in told.out
    assert "what to do   Raise num_workers" in told.out
    assert told.out.count("SLOW: ") == 2  # an empty line ends


@pytest.mark.parametrize(
    ("question", "has", "lacks"),
    [
        ("Who is the culprit?", "rank 3 on gpu-node-00", "Raise num_workers"),
        ("Where in the code is it?", "train/data.py:41", "Raise num_workers"),
        ("How much do we lose?", "121 ms of 255 ms per iteration", "ruled out"),
        ("Are you sure?", "ruled out: gpu_throttle", "Raise num_workers"),
        ("What should I do?", "Raise num_workers", "ruled out"),
        ("Which ranks only wait?", "ranks 0-2,4-7", "ruled out"),
        ("Have we seen this before?", "1 time, last 2025-01-31T12:00:00Z", "ruled out"),
        ("Why is my training slow?", "E1: own time of rank 3 is 239 ms", "seen before"),
        ("Warum ist es langsam?", "what to do", "seen before"),
        ("What was the learning rate?", "nothing that was told of this job speaks of learning, rate", "ruled out"),
    ],
)
def test_a_question_gets_what_it_asks_for(question: str, has: str, lacks: str, tmp_path: Path) -> None:
    first = samples.slow_input()[0]
    save(tmp_path, first, "diagnosis-a.json")
    save(tmp_path, replace(first, created="2025-02-01T12:00:00Z", id=""), "diagnosis-b.json")
    told = _without_model(over(tmp_path), question)
    assert has in told
    assert lacks not in told.partition("\n")[2]
    assert told.startswith("not known") == question.startswith(("Warum", "What was"))


def _without_model(setup: Setup, question: str) -> str:
    async def talk() -> str:
        async with opened(build(setup), _never) as box:
            told = [*await box.know(), await box.call("list_incidents", {"with_healthy": True})]
            return answer(question, told)

    return asyncio.run(talk())


def test_a_healthy_job_and_one_without_data_get_no_cause(tmp_path: Path) -> None:
    save(tmp_path / "well", samples.healthy()[0])
    assert "no cause was found" in _without_model(over(tmp_path / "well"), "why is it slow?")
    save(tmp_path / "dark", samples.no_data())
    told = _without_model(over(tmp_path / "dark"), "why is it slow?")
    assert told.startswith("NO DATA")
    assert "does not say that the job is healthy" in told
    (tmp_path / "none").mkdir()
    assert "there is no diagnosis yet" in _without_model(over(tmp_path / "none"), "why?")


def test_a_question_of_why_gets_the_whole_verdict() -> None:
    assert topics("why?") == topics("") == ("who", "what", "why", "cost", "confidence", "what to do")
    assert topics("who and why?") == ("who", "why")


@pytest.mark.slow
@pytest.mark.parametrize("agrees", [True, False])
def test_what_starts_something_is_asked_for_and_done_only_after_a_yes(agrees: bool, tmp_path: Path) -> None:
    small_job(tmp_path / "traces")
    (tmp_path / "out").mkdir()
    questions: list[str] = []

    def ask(question: str) -> bool:
        questions.append(question)
        return agrees

    setup = over(tmp_path / "out", allow_act=True, traces=(tmp_path / "traces",), num_processes=1)
    _, box, at = _ask(setup, script(Call([("diagnose_traces", {"path": "."})]), Say("Done.")), ask=ask)
    assert questions == ["Read and diagnose the traces in .? It may take all cores for a while."]
    assert "diagnose_traces" in at.asked[0].tools
    last = box.told[-1]
    assert last.is_error != agrees
    assert ("nothing was started" in last.text) != agrees
    assert bool(setup.works.all()) == agrees


def test_a_model_that_never_stops_asking_is_given_no_tools_at_its_last_call(tmp_path: Path) -> None:
    save(tmp_path, samples.slow_input()[0])
    rounds = iter(range(100))

    def model(asked: Asked) -> Call | Say:
        if not asked.tools:
            return Say(GOOD)
        return Call([("compare_workers", {"ranks": str(next(rounds))})])

    reply, _, at = _ask(over(tmp_path), model, limits=Limits(model_calls=3))
    assert reply.model_calls == len(at.asked) == 3
    assert grounding.is_grounded(reply.pieces)
    # One that calls tools that it was not given has said nothing.
    with pytest.raises(UserError, match="said nothing within 3 calls"):
        _ask(over(tmp_path), script(Call([("list_jobs", {})])), limits=Limits(model_calls=3))


def test_tokens_and_calls_of_tools_are_limited(tmp_path: Path) -> None:
    save(tmp_path, samples.slow_input()[0])
    many = [("compare_workers", {"ranks": str(rank)}) for rank in range(9)]
    reply, _, at = _ask(over(tmp_path), script(Call(many), Say(GOOD)), limits=Limits(tool_calls=4))
    assert len(reply.tools) == 4
    assert str(at.asked[1].text).count("refused: 4 calls of tools were made") == 5
    with pytest.raises(UserError, match="not answered after 0 calls of the model and 0 tokens"):
        _ask(over(tmp_path), script(Say(GOOD)), limits=Limits(tokens=500))
    reply, _, at = _ask(over(tmp_path), script(Call([EXPLAIN]), Say(GOOD)), limits=Limits(tokens=8_000))
    assert 4_000 < reply.tokens <= 8_000
    assert at.asked[-1].tools == []


def test_the_same_question_to_a_tool_is_not_answered_twice(tmp_path: Path) -> None:
    save(tmp_path, samples.slow_input()[0])
    reply, _, at = _ask(over(tmp_path), script(Call([EXPLAIN]), Call([EXPLAIN]), Say(GOOD)))
    assert list(reply.tools) == ["explain_finding"]
    assert "asked with the same arguments before" in at.asked[2].text


def test_a_draft_grows_while_the_model_writes_and_is_void_at_the_end(tmp_path: Path) -> None:
    save(tmp_path, samples.slow_input()[0])
    drafts: list[str] = []
    _ask(over(tmp_path), script(Say(GOOD)), draft=drafts.append)
    assert GOOD in drafts
    assert any(0 < len(text) < len(GOOD) and GOOD.startswith(text) for text in drafts)
    assert drafts[-1] == ""


def test_a_second_question_knows_the_first_one_and_its_answer(tmp_path: Path) -> None:
    save(tmp_path, samples.slow_input()[0])

    async def talk(at: Serving) -> None:
        async with opened(build(over(tmp_path)), _never) as box:
            conversation = Conversation(endpoints.Endpoint("openai", "scripted", at.url), box)
            await conversation.ask("who is it?")
            await conversation.ask("are you sure?")

    with serving(script(Say(GOOD))) as at:
        asyncio.run(talk(at))
    said = [(one["role"], one["content"]) for one in at.asked[1].messages[1:]]
    assert said == [("user", "who is it?"), ("assistant", GOOD), ("user", "are you sure?")]


def test_arguments_that_make_no_sense_are_told_to_the_model(tmp_path: Path) -> None:
    save(tmp_path, samples.slow_input()[0])
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("explain_finding", {"finding": 7}),
        ("get_source", {"around": "many"}),
        ("no_such_tool", {}),
    ]
    reply, _, at = _ask(over(tmp_path), script(Call(wrong), Say(GOOD)))
    assert grounding.is_grounded(reply.pieces)
    answers = [one["content"] for one in at.asked[1].messages if one["role"] == "tool"]
    assert len(answers) == 3
    assert all("rror" in text or "refused" in text for text in answers), answers


@pytest.mark.parametrize(
    ("failure", "says"),
    [
        (
            Fail(401, '{"error": {"message": "Incorrect API key provided: sk-secret-key-0123456789"}}'),
            "does not answer",
        ),
        (Fail(400, '{"error": {"message": "no such model"}}'), "no such model"),
        (Fail(200, "<html>a login page</html>"), "scripted at http"),
        (Fail(200, '{"choices": null}'), "scripted at http"),
    ],
)
def test_what_an_endpoint_does_wrong_is_one_sentence_without_its_key(
    failure: Fail, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, samples.slow_input()[0])

    async def talk(at: Serving) -> None:
        async with opened(build(over(tmp_path)), _never) as box:
            endpoint = endpoints.Endpoint("openai", "scripted", at.url, "sk-secret-key-0123456789")
            await Conversation(endpoint, box).ask("why?")

    with serving(script(failure)) as at, pytest.raises(EroicaError) as caught:
        asyncio.run(talk(at))
    assert says in str(caught.value)
    assert "sk-secret" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("is_streamed", [True, False])
def test_an_endpoint_that_goes_silent_is_one_sentence(is_streamed: bool, tmp_path: Path) -> None:
    save(tmp_path, samples.slow_input()[0])
    # LangChain has a limit of its own beside that of the connection, logs that it was reached and says how it is set.
    program = "import sys; from eroica.assist import endpoints; endpoints.TIMEOUT_S = float(sys.argv[1]); "
    program += "from eroica.cli import main; sys.exit(main(sys.argv[2:]))"
    limit, more = ("60", {"LANGCHAIN_OPENAI_STREAM_CHUNK_TIMEOUT_S": "0.3"}) if is_streamed else ("0.3", {})
    with serving(script(Stall())) as at:
        done = subprocess.run(
            [sys.executable, "-c", program, limit, "chat", "why?", "--in", str(tmp_path), "--model", "scripted"],
            env=os.environ | {"OPENAI_BASE_URL": at.url, "PYTHONPATH": str(Path(__file__).parent.parent)} | more,
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines() == [
        f"eroica: asking scripted at {at.url}",
        f"eroica chat: scripted at {at.url} does not answer: nothing came from it for {limit} s",
    ]


@pytest.mark.slow
def test_an_endpoint_of_anthropic_is_asked_in_its_own_words(tmp_path: Path) -> None:
    save(tmp_path, samples.slow_input()[0])

    async def talk(at: Serving) -> Reply:
        environ = {"ANTHROPIC_API_KEY": "key-of-theirs", "ANTHROPIC_BASE_URL": at.url.removesuffix("/v1")}
        endpoint = endpoints.find("claude-scripted", environ)
        assert endpoint is not None
        async with opened(build(over(tmp_path)), _never) as box:
            return await Conversation(endpoint, box).ask("why?")

    with serving(script(Call([EXPLAIN]), Say(GOOD))) as at:
        reply = asyncio.run(talk(at))
    assert grounding.is_grounded(reply.pieces)
    assert list(reply.tools) == ["explain_finding"]
    assert at.asked[0].body["stream"]
    assert any("key-of-theirs" in value for value in at.headers[0].values())


def test_a_model_is_asked_only_if_it_was_named_and_somebody_serves_it() -> None:
    keys = {"OPENAI_API_KEY": "a", "ANTHROPIC_API_KEY": "b"}
    assert endpoints.find("", keys) is None
    assert endpoints.find("", {"EROICA_MODEL": "m", "OPENAI_BASE_URL": "http://x/v1"}) == endpoints.Endpoint(
        "openai", "m", "http://x/v1"
    )
    assert endpoints.find("qwen3:32b", keys) == endpoints.Endpoint("openai", "qwen3:32b", "", "a")
    assert endpoints.find("anthropic:claude-x", keys) == endpoints.Endpoint("anthropic", "claude-x", "", "b")
    assert endpoints.find("claude-x", {"ANTHROPIC_API_KEY": "b"}) == endpoints.Endpoint(
        "anthropic", "claude-x", "", "b"
    )
    assert "'a'" not in repr(endpoints.find("m", keys))
    with pytest.raises(UserError, match="OPENAI_BASE_URL"):
        endpoints.find("m", {})
    with pytest.raises(UserError, match="ANTHROPIC_API_KEY"):
        endpoints.find("anthropic:m", {"OPENAI_API_KEY": "a"})


@pytest.mark.parametrize("module", ["langchain_openai", "mcp"])
def test_without_the_extra_the_way_out_is_said_in_a_sentence(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    assert main(["chat", "why?", "--in", str(tmp_path), "--model", "m"]) == 1
    assert "pip install 'eroica[chat]'" in capsys.readouterr().err


def test_a_server_that_does_not_start_is_told_of(tmp_path: Path) -> None:
    async def talk() -> None:
        from mcp import StdioServerParameters

        async with opened(StdioServerParameters(command=sys.executable, args=["-c", "pass"]), _never):
            raise AssertionError("there is no server")

    with pytest.raises(UnavailableError, match="does not start"):
        asyncio.run(talk())

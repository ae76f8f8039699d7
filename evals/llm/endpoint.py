"""An endpoint whose model is a function: real HTTP, real streamed chunks, scripted answers.

    with serving(lambda asked: Say("rank 3 is slow (E1).")) as endpoint:
        environ = {"OPENAI_BASE_URL": endpoint.url}
        ...
    endpoint.asked          # all that was sent to it

It stands in for models in tests and in the campaign of injections. It speaks OpenAI's chat completions and, at the same
address without /v1, Anthropic's messages, whole and streamed, with calls of tools; a `Fail` answers with a status and a
body of its own, to see what comes of that.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True, slots=True)
class Asked:
    """A request."""

    messages: Sequence[dict[str, Any]]
    tools: Sequence[str]
    """Names of those that are offered."""
    body: dict[str, Any]

    @property
    def text(self) -> str:
        """All that the model reads, one message after the other."""
        return "\n".join(str(one.get("content") or "") for one in self.messages)


@dataclass(frozen=True, slots=True)
class Say:
    """Words."""

    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """Calls of tools, each a name and its arguments."""

    calls: Sequence[tuple[str, dict[str, Any]]]
    text: str = ""


@dataclass(frozen=True, slots=True)
class Fail:
    """Something else than an answer."""

    status: int
    body: str


@dataclass(frozen=True, slots=True)
class Stall:
    """The head of an answer, and nothing after it while the endpoint is there."""


Answer = Say | Call | Fail | Stall
Model = Callable[[Asked], Answer]


@dataclass(slots=True)
class Serving:
    """A running endpoint."""

    url: str
    asked: list[Asked] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)


def script(*answers: Answer) -> Model:
    """A model that says one after the other, and the last one from then on."""
    left = list(answers)

    def model(asked: Asked) -> Answer:
        return left.pop(0) if len(left) > 1 else left[0]

    return model


@contextmanager
def serving(model: Model) -> Iterator[Serving]:
    """The endpoint, on a free port of this host."""
    lock = threading.Lock()
    ended = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            is_theirs = self.path.endswith("/messages")
            tools = [one.get("function", one)["name"] for one in body.get("tools", [])]
            system = [{"role": "system", "content": body["system"]}] if "system" in body else []
            asked = Asked([*system, *body["messages"]], tools, body)
            with lock:
                endpoint.asked.append(asked)
                endpoint.headers.append(dict(self.headers.items()))
                answer = model(asked)
            if isinstance(answer, Fail):
                self._send(answer.status, "application/json", answer.body.encode())
            elif isinstance(answer, Stall):
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.send_header("Connection", "close")
                self.end_headers()
                ended.wait()
            elif body.get("stream"):
                events = _their_events if is_theirs else _events
                self._send(200, "text/event-stream", b"".join(events(answer, asked)))
            else:
                self._send(
                    200, "application/json", json.dumps((_their_whole if is_theirs else _whole)(answer, asked)).encode()
                )

        def _send(self, status: int, kind: str, data: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    endpoint = Serving(f"http://127.0.0.1:{server.server_address[1]}/v1")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield endpoint
    finally:
        ended.set()
        server.shutdown()
        server.server_close()
        thread.join()


def _calls(answer: Say | Call) -> list[dict[str, Any]]:
    calls = answer.calls if isinstance(answer, Call) else ()
    return [
        {"index": n, "id": f"call_{n}", "type": "function", "function": {"name": name, "arguments": json.dumps(given)}}
        for n, (name, given) in enumerate(calls)
    ]


def _usage(answer: Say | Call, asked: Asked) -> dict[str, int]:
    sent, said = len(json.dumps(asked.body)) // 4, 1 + len(answer.text) // 4
    return {"prompt_tokens": sent, "completion_tokens": said, "total_tokens": sent + said}


def _whole(answer: Say | Call, asked: Asked) -> dict[str, Any]:
    calls = [{name: value for name, value in one.items() if name != "index"} for one in _calls(answer)]
    message = {"role": "assistant", "content": answer.text} | ({"tool_calls": calls} if calls else {})
    return {
        "id": "chatcmpl-1", "object": "chat.completion", "created": 0, "model": asked.body["model"],
        "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls" if calls else "stop"}],
        "usage": _usage(answer, asked),
    }  # fmt: skip


def _events(answer: Say | Call, asked: Asked) -> Iterator[bytes]:
    """In chunks of some words, as models stream."""
    words = answer.text.split(" ")
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{"content": word + (" " if n + 1 < len(words) else "")} for n, word in enumerate(words) if answer.text]
    deltas += [{"tool_calls": [one]} for one in _calls(answer)]
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 0, "model": asked.body["model"]}
    for delta in deltas:
        yield _event(head | {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
    end = "tool_calls" if isinstance(answer, Call) else "stop"
    yield _event(head | {"choices": [{"index": 0, "delta": {}, "finish_reason": end}]})
    yield _event(head | {"choices": [], "usage": _usage(answer, asked)})
    yield b"data: [DONE]\n\n"


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def _their_blocks(answer: Say | Call) -> list[dict[str, Any]]:
    calls = answer.calls if isinstance(answer, Call) else ()
    blocks: list[dict[str, Any]] = [{"type": "text", "text": answer.text}] if answer.text else []
    return blocks + [
        {"type": "tool_use", "id": f"toolu_{n}", "name": name, "input": given} for n, (name, given) in enumerate(calls)
    ]


def _their_whole(answer: Say | Call, asked: Asked) -> dict[str, Any]:
    used = _usage(answer, asked)
    return {
        "id": "msg_1", "type": "message", "role": "assistant", "model": asked.body["model"], "stop_sequence": None,
        "content": _their_blocks(answer), "stop_reason": "tool_use" if isinstance(answer, Call) else "end_turn",
        "usage": {"input_tokens": used["prompt_tokens"], "output_tokens": used["completion_tokens"]},
    }  # fmt: skip


def _their_events(answer: Say | Call, asked: Asked) -> Iterator[bytes]:
    whole = _their_whole(answer, asked)
    begun = whole | {"content": [], "stop_reason": None}
    events: list[dict[str, Any]] = [{"type": "message_start", "message": begun}]
    for index, block in enumerate(whole["content"]):
        is_text = block["type"] == "text"
        empty = dict(block)
        empty["text" if is_text else "input"] = "" if is_text else {}
        events.append({"type": "content_block_start", "index": index, "content_block": empty})
        parts = re.findall(r"\S+\s*", block["text"]) if is_text else [json.dumps(block["input"])]
        for part in parts:
            name, kind = ("text", "text_delta") if is_text else ("partial_json", "input_json_delta")
            events.append({"type": "content_block_delta", "index": index, "delta": {"type": kind, name: part}})
        events.append({"type": "content_block_stop", "index": index})
    ended = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    events.append({"type": "message_delta", "delta": ended, "usage": whole["usage"]})
    events.append({"type": "message_stop"})
    for event in events:
        yield f"event: {event['type']}\n".encode() + _event(event)

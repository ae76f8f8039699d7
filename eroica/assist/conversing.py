"""A model that answers questions about a job with the MCP server's tools, within limits, and checked afterwards.

    async with opened(server_of([...]), ask) as box:
        conversation = Conversation(endpoint, box, limits)
        reply = await conversation.ask("why is it slow?", draft)

The verdict is there before the model is asked: the newest diagnosis and the evidence of its first findings are fetched
and handed to it, so that it explains and looks further instead of guessing. LangChain's agent runs the loop; every call
of a tool goes through the `Toolbox`, whose server asks a person before anything is started. The model's last text is
taken apart by `grounding`; what is not borne out by what the tools have shown is marked or dropped, and never printed
before that but as a draft that is taken away again.

Limits are hard: calls of the model and of tools, and tokens, those that are sent included. At the last call the model
is given no tools any more, so that it answers with what it has. Needs the extra `chat`. Used by `cli_chat`.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from eroica.assist import asking, grounding
from eroica.assist.asking import count_tokens
from eroica.assist.endpoints import MISSING, Endpoint, reached
from eroica.assist.toolbox import Toolbox
from eroica.errors import UnavailableError, UserError

if TYPE_CHECKING:
    from langchain.agents.middleware import AgentMiddleware
    from langchain_core.messages import AnyMessage, BaseMessage
    from langchain_core.tools import BaseTool
    from mcp.types import Tool

MOST_KEPT = 12
"""Messages of earlier questions that go along with the next one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of one question."""

    model_calls: int = 8
    """A question takes two to five."""
    tool_calls: int = 16
    tokens: int = 100_000
    """In and out, as the endpoint counts them, else estimated. Eight calls with full answers take some 80,000."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What a model said, and what it is worth."""

    pieces: Sequence[grounding.Piece]
    model_calls: int
    tokens: int
    """In and out."""
    tokens_out: int
    """Of these, what the model wrote."""
    tools: Sequence[str]
    """Tools that it called, in order."""

    @property
    def num_unsupported(self) -> int:
        """Sentences that would be marked."""
        return sum(piece.status not in grounding.KEPT for piece in self.pieces)


@dataclass(slots=True)
class _Spent:
    """Of the question that is being answered."""

    model_calls: int = 0
    tokens: int = 0
    tokens_out: int = 0
    tools: list[str] = field(default_factory=list)
    asked: set[str] = field(default_factory=set)


class Conversation:
    """Questions and answers with one model."""

    def __init__(
        self, endpoint: Endpoint, box: Toolbox, limits: Limits | None = None, diagnosis: str = "latest"
    ) -> None:
        self._endpoint = endpoint
        self._model = endpoint.connect()
        self._box = box
        self._limits = limits or Limits()
        self._diagnosis = diagnosis
        self._earlier: list[AnyMessage] = []

    async def ask(self, question: str, draft: Callable[[str], None] = lambda text: None) -> Reply:
        """Have it answered. `draft` gets what the model has written so far, unchecked, and "" when that is void.

        Raises UnavailableError if the endpoint fails, UserError if a limit leaves no answer.
        """
        try:
            from langchain.agents import create_agent
            from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage
        except ModuleNotFoundError as error:
            raise UnavailableError(f"{MISSING} ({error.name} is missing)") from None
        known = await self._box.know(self._diagnosis)
        spent = _Spent()
        agent = create_agent(
            self._model,
            [self._tool(tool, spent) for tool in self._box.tools],
            system_prompt=asking.follow_up([one.text for one in known]),
            middleware=[_bounds(self._endpoint, self._limits, spent)],
        )
        messages: list[AnyMessage | dict[str, Any]] = [*self._earlier[-MOST_KEPT:], HumanMessage(question)]
        state: Mapping[str, Any] = {}
        text = ""
        async for mode, event in agent.astream(
            {"messages": list(messages)},
            {"recursion_limit": 4 * self._limits.model_calls + 8},
            stream_mode=["messages", "values"],
        ):
            if mode == "values" and isinstance(event, dict):
                state, text = event, ""
                draft(text)
            elif mode == "messages" and isinstance(event[0], AIMessageChunk):
                text += str(event[0].text)
                draft(text)
        last = state["messages"][-1] if state.get("messages") else None
        if not isinstance(last, AIMessage) or not str(last.text).strip():
            raise UserError(
                f"the model said nothing within {spent.model_calls} calls and {spent.tokens:,} tokens; "
                "raise --calls or --tokens, or ask for less"
            )
        answer = str(last.text).strip()
        # Of earlier questions only words are kept: answers of tools are fetched anew, and would soon fill any budget.
        self._earlier += [HumanMessage(question), AIMessage(answer)]
        pieces = grounding.check(answer + "\n", self._box.shown())
        return Reply(pieces, spent.model_calls, spent.tokens, spent.tokens_out, tuple(spent.tools))

    def _tool(self, tool: Tool, spent: _Spent) -> BaseTool:
        """A tool of the server as LangChain takes it."""
        from langchain_core.tools import StructuredTool

        is_reading = tool.annotations is not None and tool.annotations.read_only_hint is True

        async def call(**arguments: object) -> str:
            key = json.dumps([tool.name, arguments], sort_keys=True, default=str)
            if len(spent.tools) >= self._limits.tool_calls:
                return f"refused: {self._limits.tool_calls} calls of tools were made; answer with what they have told"
            if is_reading and key in spent.asked:
                return "refused: this was asked with the same arguments before, and the answer stands above"
            spent.asked.add(key)
            spent.tools.append(tool.name)
            return (await self._box.call(tool.name, arguments)).text

        return StructuredTool.from_function(
            coroutine=call,
            name=tool.name,
            description=tool.description or tool.name,
            args_schema=tool.input_schema,
        )


def _bounds(endpoint: Endpoint, limits: Limits, spent: _Spent) -> AgentMiddleware[Any, Any]:
    """Counts what the model is sent and says; no tools at its last call, no call beyond."""
    from langchain.agents.middleware import AgentMiddleware, ModelRequest, ModelResponse
    from langchain_core.messages import AIMessage
    from langchain_core.tools import BaseTool

    class Bounds(AgentMiddleware[Any, Any]):
        async def awrap_model_call(
            self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]]
        ) -> ModelResponse[Any]:
            system = [request.system_message] if request.system_message is not None else []
            sent = sum(_tokens(message) for message in [*system, *request.messages])
            sent += sum(
                count_tokens(f"{one.name} {one.description} {one.args}")
                for one in request.tools
                if isinstance(one, BaseTool)
            )
            if spent.model_calls >= limits.model_calls or spent.tokens + sent > limits.tokens:
                raise UserError(
                    f"the question is not answered after {spent.model_calls} calls of the model and {spent.tokens:,} "
                    "tokens; raise --calls or --tokens, or ask for less"
                )
            spent.model_calls += 1
            is_last = spent.model_calls >= limits.model_calls or spent.tokens + 2 * sent > limits.tokens
            with reached(endpoint):
                answer = await handler(request.override(tools=[]) if is_last else request)
            counted = [one.usage_metadata for one in answer.result if isinstance(one, AIMessage)]
            told = sum(one["total_tokens"] for one in counted if one is not None)
            written = sum(one["output_tokens"] for one in counted if one is not None)
            written = written if told else sum(_tokens(message) for message in answer.result)
            spent.tokens += told or sent + written
            spent.tokens_out += written
            if is_last:  # a model may name tools that it was not given
                for message in answer.result:
                    if isinstance(message, AIMessage):
                        message.tool_calls, message.invalid_tool_calls = [], []
            return answer

    return Bounds()


def _tokens(message: AnyMessage | BaseMessage) -> int:
    """An estimate; counters of models load from the network."""
    calls = getattr(message, "tool_calls", None)
    return count_tokens(str(message.text) + (json.dumps(calls, default=str) if calls else ""))

"""`eroica chat`: its arguments and its body. Questions about a job, answered by a model that was named, or without one.

The answer goes to stdout through `cli`. While a model writes, its draft stands on stderr, if that is a terminal, and is
taken away again: only what was checked against the evidence stays. Without a model the common questions are answered
from the diagnosis itself, and that is said.

A question for a person's yes is asked on the terminal; where there is none, the answer is no.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from eroica.cli_scaling import Adder
from eroica.errors import EroicaError, UserError
from eroica.given import count

if TYPE_CHECKING:
    from rich.live import Live

    from eroica.assist.conversing import Reply
    from eroica.assist.endpoints import Endpoint
    from eroica.assist.toolbox import Toolbox

MOST_QUESTION = 4_000


def add(command: Adder, show: Callable[[str], None], say: Callable[[str], None], ask: Callable[[str], bool]) -> None:
    """Add it. `show` puts a text on stdout, `say` a sentence on stderr, `ask` has a person say yes."""
    parser = command(
        "chat",
        lambda options: _chat(options, show, say, ask),
        "answer questions about a job, with a model that explains the evidence, or without one",
        "eroica chat 'who makes it slow, and what should I do?' --model qwen3-32b",
    )
    parser.add_argument(
        "question", nargs="*", metavar="QUESTION", help="(default: asked for, one a line, until there is none)"
    )
    parser.add_argument(
        "--in",
        dest="path",
        default="eroica-out",
        metavar="PATH|URL",
        help="what is asked about: a folder of diagnoses (default: eroica-out) or of traces, or a running coordinator: "
        "the file of its token, or its URL, with the token in EROICA_TOKEN",
    )
    parser.add_argument(
        "--diagnosis", default="latest", metavar="ID", help="the diagnosis that is meant (default: the newest)"
    )
    parser.add_argument(
        "--model",
        default="",
        metavar="NAME",
        help="who answers (default: EROICA_MODEL, else no model): a name that OPENAI_BASE_URL or OpenAI serves, or "
        "anthropic:NAME; keys are in OPENAI_API_KEY and ANTHROPIC_API_KEY",
    )
    parser.add_argument(
        "--unsupported",
        choices=("mark", "drop"),
        default="mark",
        help="sentences of the model that cite no evidence, or say what it does not show (default: mark)",
    )
    parser.add_argument(
        "--calls", type=count, default=8, metavar="N", help="calls of the model for one question at most (8)"
    )
    parser.add_argument(
        "--tokens", type=count, default=100_000, metavar="N", help="tokens for one question at most (100000)"
    )
    parser.add_argument(
        "--source",
        type=Path,
        action="append",
        default=[],
        metavar="DIR",
        help="source code below this folder may be shown to the model (default: the working directory)",
    )
    parser.add_argument(
        "--hide-names", action="store_true", help="give hosts, users and addresses other names before a model sees them"
    )
    parser.add_argument(
        "--allow-act",
        action="store_true",
        help="let the model propose to start something, such as a profile; each time you are asked on the terminal",
    )


def _chat(
    options: argparse.Namespace, show: Callable[[str], None], say: Callable[[str], None], ask: Callable[[str], bool]
) -> int:
    import asyncio

    from eroica.assist import endpoints
    from eroica.assist.toolbox import opened, server_of

    if "://" not in options.path and not os.path.exists(options.path):
        raise UserError(f"{options.path} is not there; --in names a folder of diagnoses or traces, or a coordinator")
    endpoint = endpoints.find(options.model, os.environ)
    words = [options.path if "://" in options.path else str(Path(options.path).absolute())]
    for folder in options.source:
        words += ["--source", str(folder.absolute())]
    words += ["--hide-names"] if options.hide_names else []
    words += ["--allow-act"] if options.allow_act and endpoint is not None else []
    server = server_of(words)
    screen = _Screen(ask)

    async def talk() -> None:
        async with opened(server, screen.ask) as box:
            if endpoint is None:
                say(f"eroica: no model is asked, so these are the diagnosis' own words; {endpoints.HOW}")
                await _without_model(options, box, show)
            else:
                say(f"eroica: asking {endpoint.what}")
                await _with_model(options, endpoint, box, screen, show, say)

    if endpoint is not None:
        endpoint.connect()  # what is missing is said before anything is started
    asyncio.run(talk())
    return 0


async def _without_model(options: argparse.Namespace, box: Toolbox, show: Callable[[str], None]) -> None:
    from eroica.assist.answering import answer

    async for question in _questions(options):
        told = [*await box.know(options.diagnosis), await box.call("list_incidents", {"with_healthy": True})]
        show(answer(question, told))


async def _with_model(
    options: argparse.Namespace,
    endpoint: Endpoint,
    box: Toolbox,
    screen: _Screen,
    show: Callable[[str], None],
    say: Callable[[str], None],
) -> None:
    from eroica.assist.conversing import Conversation, Limits

    limits = Limits(model_calls=options.calls, tool_calls=2 * options.calls, tokens=options.tokens)
    conversation = Conversation(endpoint, box, limits, options.diagnosis)
    async for question in _questions(options):
        try:
            with screen.drafting() as draft:
                reply = await conversation.ask(question, draft)
        except EroicaError as error:
            if options.question:
                raise
            say(f"eroica chat: {error}")  # of several questions one that fails ends only itself
            continue
        show(_text(reply, options.unsupported))
        say(f"eroica: {_told(reply, options.unsupported)}")


async def _questions(options: argparse.Namespace) -> AsyncIterator[str]:
    """The one that was given, else lines of standard input; an empty one or its end is the end."""
    import asyncio

    if options.question:
        yield " ".join(options.question)[:MOST_QUESTION]
        return
    while True:
        if sys.stdin is None:
            return
        if sys.stdin.isatty() and sys.stderr is not None:
            sys.stderr.write("ask (an empty line ends): ")
            sys.stderr.flush()
        line = (await asyncio.to_thread(sys.stdin.readline)).strip()
        if not line:
            return
        yield line[:MOST_QUESTION]


def _text(reply: Reply, unsupported: str) -> str:
    """What stays of an answer, fit for a terminal."""
    from eroica.assist import grounding
    from eroica.untrusted import clean

    text = (grounding.dropped if unsupported == "drop" else grounding.marked)(reply.pieces)
    return "\n".join(clean(line, 4_000) for line in text.strip().splitlines()) + "\n"


def _told(reply: Reply, unsupported: str) -> str:
    found = f"{reply.model_calls} calls of the model, {len(reply.tools)} of tools, {reply.tokens:,} tokens"
    num = reply.num_unsupported
    if not num:
        return f"{found}; each claim cites evidence that was shown, which does not prove that it follows from it"
    sentences = f"{num} sentence{'s' if num > 1 else ''}"
    return f"{found}; {sentences} not borne out by the evidence {'left out' if unsupported == 'drop' else 'marked'}"


class _Screen:
    """What stands on the terminal while a model is at work: its draft, or a question for a person's yes."""

    def __init__(self, ask: Callable[[str], bool]) -> None:
        self._ask = ask
        self._live: Live | None = None

    def ask(self, question: str) -> bool:
        """The person's word; nothing else is drawn meanwhile."""
        live = self._live
        if live is not None:
            live.stop()
        try:
            return self._ask(question)
        finally:
            if live is not None:
                live.start()

    @contextlib.contextmanager
    def drafting(self) -> Iterator[Callable[[str], None]]:
        """Shows what a model has written so far on stderr, if that is a terminal, and takes it away at the end."""
        if sys.stderr is None or not sys.stderr.isatty():
            yield lambda text: None
            return
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        from eroica.untrusted import clean

        console = Console(stderr=True)
        with Live(console=console, transient=True, refresh_per_second=8) as self._live:
            live = self._live

            def update(text: str) -> None:
                lines = text.splitlines()[-max(1, console.height - 3) :]
                shown = "\n".join(["unchecked draft:", *(clean(line, 400) for line in lines)])
                live.update(Text(shown if text else "the model is at work", style="dim"))

            update("")
            try:
                yield update
            finally:
                self._live = None

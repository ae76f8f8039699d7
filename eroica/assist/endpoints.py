"""Which model is asked, where, and how it is reached: any endpoint that speaks OpenAI's API, or Anthropic's.

    endpoint = find("qwen3-32b", os.environ)      # None: no model is configured, and nothing is sent anywhere
    model = endpoint.connect()                    # a LangChain chat model; needs the extra `chat`

A model is asked only if somebody named one, by --model or EROICA_MODEL: a key that lies in the environment for other
programs is no consent to send a diagnosis out. Addresses and keys come from the variables that every client of these
APIs reads. What an endpoint does wrong becomes an UnavailableError in one sentence, without its key.

Used by `conversing` (chat) and `proposing` (edits for `eroica fix`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from eroica.errors import UnavailableError, UserError
from eroica.untrusted import clean

if TYPE_CHECKING:
    from langchain_core.language_models import BaseChatModel

# What it warns of comes as an error as well; where nobody has set up logging, Python would write it to stderr.
logging.getLogger("langchain_openai").addHandler(logging.NullHandler())

VARIABLE = "EROICA_MODEL"
TIMEOUT_S = 120.0
"""For one answer to begin or go on; a local model on a busy machine needs half a minute."""
MOST_ANSWER_TOKENS = 4_000
"""Of one answer: 200 words or a patch of 120 lines need a fraction."""
ANTHROPIC = "https://api.anthropic.com"
PROVIDERS = ("openai", "anthropic")
_CLOSE = {"Connection": "close"}
"""LangChain shares connections within a process and never closes them, and one of an event loop that has ended fails
the next question. A new one for each answer costs nothing beside it."""
HOW = f"name a model by --model or {VARIABLE}, its endpoint by OPENAI_BASE_URL, its key by OPENAI_API_KEY"
MISSING = "models are asked by LangChain, which is not installed; try: pip install 'eroica[chat]'"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A model and where it is served."""

    provider: str
    """One of PROVIDERS: whose API is spoken."""
    model: str
    url: str = ""
    """"" = the provider's own."""
    key: str = field(default="", repr=False)

    @property
    def what(self) -> str:
        """For people."""
        return clean(f"{self.model} at {self.url or self.provider}", 200)

    def connect(self) -> BaseChatModel:
        """A chat model. Raises UnavailableError where the extra is missing."""
        try:
            from pydantic import SecretStr

            if self.provider == "anthropic":
                from langchain_anthropic import ChatAnthropic

                return ChatAnthropic(
                    model_name=self.model,
                    base_url=self.url or ANTHROPIC,
                    api_key=SecretStr(self.key),
                    timeout=TIMEOUT_S,
                    max_retries=1,
                    max_tokens_to_sample=MOST_ANSWER_TOKENS,
                    stop=None,
                    default_headers=_CLOSE,
                )
            from langchain_openai import ChatOpenAI

            return ChatOpenAI(
                model=self.model,
                base_url=self.url or None,
                api_key=SecretStr(self.key or "none"),  # local servers want none, the client does
                timeout=TIMEOUT_S,
                max_retries=1,
                max_completion_tokens=MOST_ANSWER_TOKENS,
                use_responses_api=False,  # compatible servers have no other than chat completions
                stream_usage=True,
                default_headers=_CLOSE,
            )
        except ModuleNotFoundError as error:
            raise UnavailableError(f"{MISSING} ({error.name} is missing)") from None


def find(model: str, environ: Mapping[str, str]) -> Endpoint | None:
    """The endpoint of `model`, else of EROICA_MODEL; None if neither names one. Raises UserError.

    A name may begin with its provider, as in "anthropic:claude-x". Without one it is Anthropic's if only a key of
    theirs is there, else OpenAI's or that of OPENAI_BASE_URL.
    """
    name = model or environ.get(VARIABLE, "")
    if not name:
        return None
    provider, _, rest = name.partition(":")
    url, key = environ.get("OPENAI_BASE_URL", ""), environ.get("OPENAI_API_KEY", "")
    theirs = environ.get("ANTHROPIC_API_KEY", "")
    if provider in PROVIDERS and rest:
        name = rest
    else:  # models of ollama and others have a colon in their names
        provider = "anthropic" if theirs and not (url or key) else "openai"
    if provider == "anthropic":
        if not theirs:
            raise UserError(f"{clean(name, 80)} of Anthropic needs a key in ANTHROPIC_API_KEY")
        return Endpoint(provider, name, environ.get("ANTHROPIC_BASE_URL", ""), theirs)
    if not (url or key):
        raise UserError(f"nobody is known who serves {clean(name, 80)}; {HOW}")
    return Endpoint(provider, name, url, key)


@contextmanager
def reached(endpoint: Endpoint) -> Iterator[None]:
    """Around all that asks it: its failures become an UnavailableError, and no trace goes to a third party."""
    import httpx
    import httpx2
    from langsmith import tracing_context

    if endpoint.provider == "anthropic":
        from anthropic import AnthropicError as ClientError
        from anthropic import APITimeoutError
    else:
        from openai import APITimeoutError  # type: ignore[assignment]  # siblings without a common parent
        from openai import OpenAIError as ClientError  # type: ignore[assignment]
    try:
        with tracing_context(enabled=False):
            yield
    except (APITimeoutError, TimeoutError, httpx.TimeoutException, httpx2.TimeoutException):
        # Of the client, of LangChain and of the connection, whichever is first; what they say is about their own knobs.
        raise UnavailableError(f"{endpoint.what} does not answer: nothing came from it for {TIMEOUT_S:g} s") from None
    except (ClientError, httpx.HTTPError, httpx2.HTTPError) as error:
        raise UnavailableError(f"{endpoint.what} does not answer: {_reason(error, endpoint)}") from None
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        # What the clients and LangChain raise for an answer of another shape. Our own code in here raises EroicaErrors.
        raise UnavailableError(
            f"{endpoint.what} answers as no such endpoint does: {_reason(error, endpoint)}"
        ) from error


def _reason(error: Exception, endpoint: Endpoint) -> str:
    text = str(error) or type(error).__name__
    return clean(text.replace(endpoint.key, "[key]") if endpoint.key else text, 300)

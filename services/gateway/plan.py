"""What the body of one request comes to: the choices to generate and how the answer is to look.

Made by an API on a pool thread, from nothing but the body; carried out by `services.gateway.generation`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from services.gateway.errors import ApiError
from services.gateway.output import Delta, Ending, Result, Usage
from services.protocol import Sampling


class OutputParser(Protocol):
    """Tells reasoning, content and tool calls apart in the text of one choice, as it comes."""

    def push(self, text: str) -> Delta: ...

    def flush(self) -> Delta:
        """What was held back because more might have come. Called once, at the end."""

    @property
    def num_tool_calls(self) -> int:
        """Complete ones."""

    @property
    def thinking(self) -> bool:
        """What comes next is reasoning, as far as is known."""

    @property
    def ended(self) -> bool:
        """Whatever else the model would write is not wanted."""


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What only the running gateway knows of an answer."""

    request_id: str
    created: int
    """When the request came, in Unix seconds."""
    fingerprint: str | None
    """Names what computes the answer."""


class Answer(ABC):
    """How one answer is written, whole and as server-sent events. Every method returns bytes to send, maybe none."""

    def start(self) -> bytes:
        """Events before anything of any choice."""
        return b""

    @abstractmethod
    def delta(self, choice: int, delta: Delta) -> bytes: ...

    @abstractmethod
    def finish(self, choice: int, ending: Ending) -> bytes: ...

    @abstractmethod
    def end(self, usage: Usage) -> bytes:
        """Events after every choice has finished."""

    @abstractmethod
    def body(self, results: Sequence[Result], usage: Usage) -> bytes: ...


@dataclass(frozen=True, slots=True)
class PromptPlan:
    token_ids: list[int]
    sampling: Sampling
    """Of the first choice; the others differ in `choice` only."""
    echo: str = ""
    """Text that is to stand before the output."""
    offsets: Sequence[int] = ()
    """Where each prompt token begins in it, for a prompt that is to be scored."""


@dataclass(frozen=True, slots=True)
class TextOptions:
    stops: tuple[str, ...] = ()
    include_stop: bool = False
    """The stop string that is met stays in the text."""
    keep_special: bool = False
    """Special tokens are spelled out in the text."""
    token_ids: bool = False
    """Each delta lists its tokens."""
    no_output: bool = False
    """The one token that is generated is not part of the answer: only the prompt is wanted."""


@dataclass(frozen=True, slots=True)
class Plan:
    prompts: list[PromptPlan]
    answer: Callable[[AnswerHead], Answer]
    n: int = 1
    stream: bool = False
    text: TextOptions = TextOptions()
    parser: Callable[[], OutputParser | None] = lambda: None
    """A new one for each choice; None where all text is content."""
    cache_salt: str = ""
    priority: int = 0

    @property
    def num_choices(self) -> int:
        return self.n * len(self.prompts)

    @property
    def num_prompt_tokens(self) -> int:
        """Of each prompt once, however many choices."""
        return sum(len(prompt.token_ids) for prompt in self.prompts)


class Api(ABC):
    """One of the APIs that generate."""

    name: str
    """In metrics and records."""
    id_prefix: str
    id_separator: str = "-"

    @abstractmethod
    def plan(self, body: bytes, context: int) -> Plan:
        """On a pool thread. `context`: the most tokens, prompt and output, there is room for. Raises ApiError."""

    def error_body(self, error: ApiError) -> bytes:
        """The whole answer when nothing has been sent."""
        return error.encoded()

    def error_event(self, error: ApiError) -> bytes:
        """The last event of an answer that has begun."""
        return b"data: " + error.encoded() + b"\n\n"

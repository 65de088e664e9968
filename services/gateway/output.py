"""What the output of one choice is made of, between the tokens of the workers and the bytes of an answer. Pure.

A choice is a series of Deltas and one Ending. A streamed answer writes each; a whole answer adds them up in a
Result. Both are made of the same deltas, so they cannot differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from services.protocol import TokenLogprob

Reason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token with its log probabilities, and where its text begins in the answer, in characters."""

    token_id: int
    logprob: TokenLogprob | None
    """None for the first token of a prompt, which nothing predicts."""
    text_offset: int


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """`id` and `name` only in the first delta of a call; `arguments` of all deltas, joined, are the JSON."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


@dataclass(slots=True)
class Delta:
    """What a step added to one choice. Within one delta reasoning comes first, then content, then tool calls."""

    content: str = ""
    reasoning: str = ""
    tool_calls: Sequence[ToolCallDelta] = ()
    scored: Sequence[ScoredToken] = ()
    token_ids: Sequence[int] = ()
    """Only for a request that asked for them."""

    def then(self, later: Delta) -> Delta:
        return Delta(
            self.content + later.content,
            self.reasoning + later.reasoning,
            [*self.tool_calls, *later.tool_calls],
            [*self.scored, *later.scored],
            [*self.token_ids, *later.token_ids],
        )

    def __bool__(self) -> bool:
        return bool(self.content or self.scored or self.reasoning or self.tool_calls or self.token_ids)


@dataclass(frozen=True, slots=True)
class Ending:
    reason: Reason
    stop: str | int | None = None
    """The stop string, or the stop token the client asked for, that ended the text."""


@dataclass(slots=True)
class ToolCall:
    id: str
    name: str
    arguments: str


@dataclass(slots=True)
class Result:
    """One whole choice."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    scored: list[ScoredToken] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    ending: Ending | None = None

    def add(self, delta: Delta) -> None:
        self.content += delta.content
        self.reasoning += delta.reasoning
        self.scored += delta.scored
        self.token_ids += delta.token_ids
        for call in delta.tool_calls:
            if call.name is not None:
                assert call.id is not None, "a call's first delta names and identifies it"
                self.tool_calls.append(ToolCall(call.id, call.name, ""))
            self.tool_calls[call.index].arguments += call.arguments


@dataclass(frozen=True, slots=True)
class Usage:
    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int | None
    """Prompt tokens that a prefix cache already had; None where the answer ended before a worker said."""
    num_reasoning_tokens: int = 0
    """Completion tokens that were reasoning, the marks around it included."""

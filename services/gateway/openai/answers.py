"""How answers look: chat.completion and text_completion, whole and as server-sent events. Pure.

One object a request. A streamed token costs one JSON string and two concatenations: what does not change from
event to event is encoded once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from services.protocol import TokenLogprob

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode
_SPLIT = "\x00text\x00"
Spell = Callable[[int], bytes]
"""The bytes a token id stands for."""


@dataclass(frozen=True, slots=True)
class Usage:
    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int | None
    """Prompt tokens that a prefix cache already had; None where the answer ended before a worker said."""

    def body(self) -> dict[str, Any]:
        cached = self.num_cached_tokens
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_completion_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_completion_tokens,
            "prompt_tokens_details": None if cached is None else {"cached_tokens": cached},
        }


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token with its log probabilities, and where its text begins in the answer, in characters."""

    token_id: int
    logprob: TokenLogprob
    text_offset: int


def sse(value: Any) -> bytes:
    return b"data: " + _encode(value) + b"\n\n"


class Answer(ABC):
    """`include_usage`: every event has a usage field, null but for the last."""

    object: str
    chunk_object: str

    def __init__(
        self, answer_id: str, model: str, created: int, spell: Spell, *, include_usage: bool, scored: bool
    ) -> None:
        self._id = answer_id
        self._model = model
        self._created = created
        self._spell = spell
        self._include_usage = include_usage
        self._scored = scored
        frame = sse(self._chunk([self._text_choice(_SPLIT, None)]))
        self._before, self._after = frame.split(_encode(_SPLIT))

    def text_event(self, text: str, scored: Sequence[ScoredToken] = ()) -> bytes:
        if not scored:
            return self._before + _encode(text) + self._after
        return sse(self._chunk([self._text_choice(text, self.logprobs(scored))]))

    def last_events(self, reason: str, usage: Usage) -> bytes:
        """Finish, usage if it was asked for, and the end mark."""
        events = sse(self._chunk([self._last_choice(reason)]))
        if self._include_usage:
            events += sse(self._chunk([]) | {"usage": usage.body()})
        return events + DONE

    def body(self, text: str, scored: Sequence[ScoredToken], reason: str, usage: Usage) -> bytes:
        logprobs = self.logprobs(scored) if self._scored else None
        choice = self._whole_choice(text, logprobs, reason)
        head = {"id": self._id, "object": self.object, "created": self._created, "model": self._model}
        return _encode(head | {"choices": [choice], "usage": usage.body()})

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk: dict[str, Any] = {
            "id": self._id,
            "object": self.chunk_object,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }
        return chunk | {"usage": None} if self._include_usage else chunk

    @abstractmethod
    def first_event(self) -> bytes:
        """What comes before any text."""

    @abstractmethod
    def logprobs(self, scored: Sequence[ScoredToken]) -> dict[str, Any]: ...

    @abstractmethod
    def _text_choice(self, text: str, logprobs: dict[str, Any] | None) -> dict[str, Any]: ...

    @abstractmethod
    def _last_choice(self, reason: str) -> dict[str, Any]: ...

    @abstractmethod
    def _whole_choice(self, text: str, logprobs: dict[str, Any] | None, reason: str) -> dict[str, Any]: ...


class ChatAnswer(Answer):
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def first_event(self) -> bytes:
        return sse(self._chunk([_chat_choice({"role": "assistant", "content": ""}, None, None)]))

    def logprobs(self, scored: Sequence[ScoredToken]) -> dict[str, Any]:
        content = [
            self._entry(token.token_id, token.logprob.logprob)
            | {"top_logprobs": [self._entry(other, logprob) for other, logprob in token.logprob.top]}
            for token in scored
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        spelled = self._spell(token_id)
        return {"token": spelled.decode(errors="replace"), "logprob": logprob, "bytes": list(spelled)}

    def _text_choice(self, text: str, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        return _chat_choice({"content": text}, logprobs, None)

    def _last_choice(self, reason: str) -> dict[str, Any]:
        return _chat_choice({}, None, reason)

    def _whole_choice(self, text: str, logprobs: dict[str, Any] | None, reason: str) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": 0, "message": message, "logprobs": logprobs, "finish_reason": reason}


def _chat_choice(delta: dict[str, str], logprobs: dict[str, Any] | None, reason: str | None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


class CompletionAnswer(Answer):
    object = "text_completion"
    chunk_object = "text_completion"

    def first_event(self) -> bytes:
        return b""

    def logprobs(self, scored: Sequence[ScoredToken]) -> dict[str, Any]:
        return {
            "tokens": [self._token(token.token_id) for token in scored],
            "token_logprobs": [token.logprob.logprob for token in scored],
            "top_logprobs": [{self._token(i): logprob for i, logprob in token.logprob.top} for token in scored],
            "text_offset": [token.text_offset for token in scored],
        }

    def _token(self, token_id: int) -> str:
        """The token's text; one that is no whole character as OpenAI writes it: bytes:\\xe6."""
        spelled = self._spell(token_id)
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)

    def _text_choice(self, text: str, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        return {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": None}

    def _last_choice(self, reason: str) -> dict[str, Any]:
        return {"index": 0, "text": "", "logprobs": None, "finish_reason": reason}

    def _whole_choice(self, text: str, logprobs: dict[str, Any] | None, reason: str) -> dict[str, Any]:
        return {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": reason}

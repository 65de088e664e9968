"""How the answers of chat/completions and completions look, whole and as server-sent events. Pure.

One object a request. A streamed token costs one JSON string and two concatenations: what does not change from
event to event is encoded once a choice.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from services.gateway.output import Delta, Ending, Result, ScoredToken, ToolCall, ToolCallDelta, Usage
from services.gateway.plan import Answer, AnswerHead

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode
_SPLIT = "\x00text\x00"
Spell = Callable[[int], bytes]
"""The bytes a token id stands for."""


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    model: str
    num_choices: int
    spell: Spell
    include_usage: bool = False
    """Every event has a usage field, null but for the last."""
    scored: bool = False
    tokens_as_ids: bool = False
    """Tokens in logprobs are written token_id:5, which no two tokens share."""
    prompts: Sequence[list[int]] | None = None
    """Token ids of the prompts, where the request asked for token ids."""
    num_per_prompt: int = 1
    num_prompt_tokens: int = 0

    def prompt_of(self, choice: int) -> list[int] | None:
        return self.prompts[choice // self.num_per_prompt] if self.prompts is not None else None


def usage_body(usage: Usage) -> dict[str, Any]:
    cached, reasoning = usage.num_cached_tokens, usage.num_reasoning_tokens
    details = {"completion_tokens_details": {"reasoning_tokens": reasoning}} if reasoning else {}
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_completion_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_completion_tokens,
        "prompt_tokens_details": None if cached is None else {"cached_tokens": cached},
        **details,
    }


def sse(value: Any) -> bytes:
    return b"data: " + _encode(value) + b"\n\n"


class OpenAiAnswer(Answer):
    object: str
    chunk_object: str

    def __init__(self, options: AnswerOptions, head: AnswerHead) -> None:
        self._options = options
        self._head = {"id": head.request_id, "object": self.object, "created": head.created, "model": options.model}
        if head.fingerprint is not None:
            self._head["system_fingerprint"] = head.fingerprint
        self._chunk_head = self._head | {"object": self.chunk_object}
        self._frames: dict[int, tuple[bytes, bytes]] = {}

    def delta(self, choice: int, delta: Delta) -> bytes:
        if delta.scored or delta.token_ids or delta.reasoning or delta.tool_calls:
            logprobs = self.logprobs(delta.scored) if delta.scored else None
            written = self._delta_choice(choice, delta, logprobs)
            if self._options.prompts is not None:
                written["token_ids"] = list(delta.token_ids)
            return sse(self._chunk([written]))
        before, after = self._frames.get(choice) or self._frame(choice)
        return before + _encode(delta.content) + after

    def _frame(self, choice: int) -> tuple[bytes, bytes]:
        whole = sse(self._chunk([self._delta_choice(choice, Delta(_SPLIT), None)]))
        before, after = whole.split(_encode(_SPLIT))
        self._frames[choice] = before, after
        return before, after

    def finish(self, choice: int, ending: Ending) -> bytes:
        last = self._last_choice(choice) | {"finish_reason": ending.reason, "stop_reason": ending.stop}
        return sse(self._chunk([last]))

    def end(self, usage: Usage) -> bytes:
        if not self._options.include_usage:
            return DONE
        return sse(self._chunk([]) | {"usage": usage_body(usage)}) + DONE

    def body(self, results: Sequence[Result], usage: Usage) -> bytes:
        choices = [self._whole(index, result) for index, result in enumerate(results)]
        return _encode(self._head | {"choices": choices, "usage": usage_body(usage)} | self._whole_extras())

    def _whole(self, index: int, result: Result) -> dict[str, Any]:
        assert result.ending is not None, "a whole answer has ended"
        logprobs = self.logprobs(result.scored) if self._options.scored else None
        choice = self._whole_choice(index, result) | {
            "logprobs": logprobs,
            "finish_reason": result.ending.reason,
            "stop_reason": result.ending.stop,
        }
        return choice | ({"token_ids": result.token_ids} if self._options.prompts is not None else {})

    def _whole_extras(self) -> dict[str, Any]:
        return {}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = self._chunk_head | {"choices": choices}
        return chunk | {"usage": None} if self._options.include_usage else chunk

    @abstractmethod
    def logprobs(self, scored: Sequence[ScoredToken]) -> dict[str, Any]: ...

    @abstractmethod
    def _delta_choice(self, choice: int, delta: Delta, logprobs: dict[str, Any] | None) -> dict[str, Any]: ...

    @abstractmethod
    def _last_choice(self, choice: int) -> dict[str, Any]: ...

    @abstractmethod
    def _whole_choice(self, index: int, result: Result) -> dict[str, Any]: ...


class ChatAnswer(OpenAiAnswer):
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def start(self) -> bytes:
        role = {"role": "assistant", "content": ""}
        chunks = [self._chunk([_chat_choice(index, role, None)]) for index in range(self._options.num_choices)]
        if chunks:
            chunks[0] |= self._whole_extras()
        return b"".join(map(sse, chunks))

    def logprobs(self, scored: Sequence[ScoredToken]) -> dict[str, Any]:
        return {"content": [logprob_entry(token, self._options) for token in scored], "refusal": None}

    def _delta_choice(self, choice: int, delta: Delta, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if delta.reasoning:
            fields["reasoning_content"] = delta.reasoning
        if delta.content or not (delta.reasoning or delta.tool_calls):
            fields["content"] = delta.content
        if delta.tool_calls:
            fields["tool_calls"] = [_call_delta(call) for call in delta.tool_calls]
        return _chat_choice(choice, fields, logprobs)

    def _last_choice(self, choice: int) -> dict[str, Any]:
        return _chat_choice(choice, {}, None)

    def _whole_choice(self, index: int, result: Result) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": result.content, "refusal": None}
        if result.reasoning:
            message["reasoning_content"] = result.reasoning
        if result.tool_calls:
            message["content"] = result.content or None
            message["tool_calls"] = [call_body(call) for call in result.tool_calls]
        return {"index": index, "message": message}

    def _whole_extras(self) -> dict[str, Any]:
        return {"prompt_token_ids": self._options.prompt_of(0)} if self._options.prompts is not None else {}


def logprob_entry(token: ScoredToken, options: AnswerOptions) -> dict[str, Any]:
    """A token of a chat with its alternatives."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        spelled = options.spell(token_id)
        name = f"token_id:{token_id}" if options.tokens_as_ids else spelled.decode(errors="replace")
        return {"token": name, "logprob": logprob, "bytes": list(spelled)}

    assert token.logprob is not None, "a chat lists no prompt tokens"
    top = [entry(token_id, logprob) for token_id, logprob in token.logprob.top]
    return entry(token.token_id, token.logprob.logprob) | {"top_logprobs": top}


def call_body(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _call_delta(call: ToolCallDelta) -> dict[str, Any]:
    """Nulls would overwrite, in clients that merge deltas, what an earlier delta said."""
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


def _chat_choice(index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}


class CompletionAnswer(OpenAiAnswer):
    object = "text_completion"
    chunk_object = "text_completion"

    def start(self) -> bytes:
        if self._options.prompts is None:
            return b""
        choices = [self._text_choice(index, "", None) for index in range(self._options.num_choices)]
        for index, choice in enumerate(choices):
            choice["prompt_token_ids"] = self._options.prompt_of(index)
        return b"".join(sse(self._chunk([choice])) for choice in choices)

    def logprobs(self, scored: Sequence[ScoredToken]) -> dict[str, Any]:
        return {
            "tokens": [self._token(token.token_id) for token in scored],
            "token_logprobs": [token.logprob and token.logprob.logprob for token in scored],
            "top_logprobs": [self._top(token) for token in scored],
            "text_offset": [token.text_offset for token in scored],
        }

    def _top(self, token: ScoredToken) -> dict[str, float] | None:
        """The token itself is always among them."""
        if token.logprob is None:
            return None
        top = {self._token(token_id): logprob for token_id, logprob in token.logprob.top}
        top.setdefault(self._token(token.token_id), token.logprob.logprob)
        return top

    def _token(self, token_id: int) -> str:
        """The token's text; one that is no whole character as OpenAI writes it: bytes:\\xe6."""
        if self._options.tokens_as_ids:
            return f"token_id:{token_id}"
        spelled = self._options.spell(token_id)
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)

    def _text_choice(self, index: int, text: str, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}

    def _delta_choice(self, choice: int, delta: Delta, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        return self._text_choice(choice, delta.content, logprobs)

    def _last_choice(self, choice: int) -> dict[str, Any]:
        return self._text_choice(choice, "", None)

    def _whole_choice(self, index: int, result: Result) -> dict[str, Any]:
        prompt = self._options.prompt_of(index)
        extra = {} if prompt is None else {"prompt_token_ids": prompt}
        return {"index": index, "text": result.content} | extra

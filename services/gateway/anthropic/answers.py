"""How an answer of /v1/messages looks, whole and as typed events. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from services.gateway.blocks import Added, Block, BlockRow, Change, Closed, Opened, blocks_of
from services.gateway.openai.answers import AnswerOptions
from services.gateway.output import Delta, Ending, Result, Usage
from services.gateway.plan import Answer, AnswerHead

_encode = msgspec.json.Encoder().encode
_STOP_REASON = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesAnswer(Answer):
    """`num_prompt_tokens` is told at the start, before usage is known."""

    def __init__(self, num_prompt_tokens: int, options: AnswerOptions, head: AnswerHead) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._options = options
        self._head = head
        self._row = BlockRow()
        self._ending: Ending | None = None

    def start(self) -> bytes:
        usage = {"input_tokens": self._num_prompt_tokens, "output_tokens": 0}
        return _event("message_start", message=self._message([], None, usage))

    def delta(self, choice: int, delta: Delta) -> bytes:
        return b"".join(map(_change, self._row.add(delta)))

    def finish(self, choice: int, ending: Ending) -> bytes:
        self._ending = ending
        return b"".join(map(_change, self._row.finish()))

    def end(self, usage: Usage) -> bytes:
        assert self._ending is not None, "it has ended"
        return _event("message_delta", delta=_stop(self._ending), usage=_usage(usage)) + _event("message_stop")

    def body(self, results: Sequence[Result], usage: Usage) -> bytes:
        content = [_whole(block) for block in blocks_of(results[0])]
        return _encode(self._message(content, results[0].ending, _usage(usage)))

    def _message(self, content: list[Any], ending: Ending | None, usage: dict[str, Any]) -> dict[str, Any]:
        head = {"id": self._head.request_id, "type": "message", "role": "assistant", "model": self._options.model}
        return head | {"content": content} | _stop(ending) | {"usage": usage}


def _event(name: str, /, **fields: Any) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + _encode({"type": name} | fields) + b"\n\n"


def _change(change: Change) -> bytes:
    index = change.block.index
    match change:
        case Opened(block):
            return _event("content_block_start", index=index, content_block=_empty(block))
        case Added(block, text):
            kind, name = _DELTA_OF[block.kind]
            return _event("content_block_delta", index=index, delta={"type": kind, name: text})
        case Closed():
            return _event("content_block_stop", index=index)


_DELTA_OF = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


def _empty(block: Block) -> dict[str, Any]:
    return _whole(Block(block.index, block.kind, "", block.call_id, block.name))


def _whole(block: Block) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": _object(block.text)}


def _object(text: str) -> Any:
    """A call's arguments; those of one that was cut off are no object."""
    try:
        return msgspec.json.decode(text or "{}")
    except msgspec.DecodeError:
        return {}


def _stop(ending: Ending | None) -> dict[str, Any]:
    if ending is None:
        return {"stop_reason": None, "stop_sequence": None}
    if ending.reason == "stop" and isinstance(ending.stop, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": ending.stop}
    return {"stop_reason": _STOP_REASON[ending.reason], "stop_sequence": None}


def _usage(usage: Usage) -> dict[str, Any]:
    """Anthropic counts what was read from a cache apart."""
    cached = usage.num_cached_tokens or 0
    return {
        "input_tokens": usage.num_prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.num_completion_tokens,
    }

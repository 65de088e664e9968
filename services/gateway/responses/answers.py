"""How an answer of /v1/responses looks, whole and as typed events. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from services.gateway.blocks import Added, Block, BlockRow, Change, Closed, Opened, blocks_of
from services.gateway.openai.answers import AnswerOptions, logprob_entry
from services.gateway.output import Delta, Ending, Result, ScoredToken, Usage
from services.gateway.plan import Answer, AnswerHead
from services.gateway.responses.requests import ResponsesRequest

_encode = msgspec.json.Encoder().encode


class ResponsesAnswer(Answer):
    def __init__(self, request: ResponsesRequest, options: AnswerOptions, head: AnswerHead) -> None:
        self._request = request
        self._options = options
        self._head = head
        self._row = BlockRow()
        self._ending: Ending | None = None
        self._number = 0

    def start(self) -> bytes:
        response = self._response("in_progress", [], None)
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def delta(self, choice: int, delta: Delta) -> bytes:
        return b"".join(map(self._change, self._row.add(delta)))

    def finish(self, choice: int, ending: Ending) -> bytes:
        self._ending = ending
        return b"".join(map(self._change, self._row.finish()))

    def end(self, usage: Usage) -> bytes:
        status = self._status()
        response = self._response(status, self._row.blocks, usage)
        return self._event(f"response.{status}", response=response)

    def body(self, results: Sequence[Result], usage: Usage) -> bytes:
        self._ending = results[0].ending
        return _encode(self._response(self._status(), blocks_of(results[0]), usage))

    def _status(self) -> str:
        assert self._ending is not None, "it has ended"
        return "incomplete" if self._ending.reason == "length" else "completed"

    def _event(self, name: str, /, **fields: Any) -> bytes:
        data = {"type": name, "sequence_number": self._number} | fields
        self._number += 1
        return b"event: " + name.encode() + b"\ndata: " + _encode(data) + b"\n\n"

    def _change(self, change: Change) -> bytes:
        block = change.block
        where: dict[str, Any] = {"item_id": self._item_id(block), "output_index": block.index}
        match change:
            case Opened():
                item = self._item(block, "in_progress")
                opened = self._event("response.output_item.added", output_index=block.index, item=item)
                return opened + self._part_event("added", block, where)
            case Added():
                extra = {"logprobs": self._logprobs(change.scored)} if block.kind == "text" else {}
                return self._event(
                    f"{_EVENT_OF[block.kind]}.delta", **where, **_part_index(block), delta=change.text, **extra
                )
            case Closed():
                return self._closed(block, where)

    def _closed(self, block: Block, where: dict[str, Any]) -> bytes:
        text: dict[str, Any] = {_FIELD_OF[block.kind]: block.text}
        if block.kind == "text":
            text["logprobs"] = self._logprobs(block.scored)
        if block.kind == "call":
            text["name"] = block.name
        done = self._event(f"{_EVENT_OF[block.kind]}.done", **where, **_part_index(block), **text)
        # In this order, which numbers them.
        done += self._part_event("done", block, where)
        item = self._item(block, "completed")
        return done + self._event("response.output_item.done", output_index=block.index, item=item)

    def _part_event(self, what: str, block: Block, where: dict[str, Any]) -> bytes:
        if block.kind == "call":
            return b""
        return self._event(f"response.content_part.{what}", **where, content_index=0, part=self._part(block))

    def _item_id(self, block: Block) -> str:
        prefix = {"reasoning": "rs", "text": "msg", "call": "fc"}[block.kind]
        return f"{prefix}_{self._head.request_id.partition('_')[2]}_{block.index}"

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        """In progress, an item shows nothing yet."""
        item: dict[str, Any] = {"id": self._item_id(block), "status": status}
        done = status != "in_progress"
        if block.kind == "call":
            call = {"call_id": block.call_id, "name": block.name, "arguments": block.text if done else ""}
            return {"type": "function_call"} | item | call
        parts = [self._part(block)] if done else []
        if block.kind == "reasoning":
            return {"type": "reasoning"} | item | {"summary": [], "content": parts}
        return {"type": "message"} | item | {"role": "assistant", "content": parts}

    def _part(self, block: Block) -> dict[str, Any]:
        if block.kind == "reasoning":
            return {"type": "reasoning_text", "text": block.text}
        return {
            "type": "output_text",
            "text": block.text,
            "annotations": [],
            "logprobs": self._logprobs(block.scored),
        }

    def _logprobs(self, scored: Sequence[ScoredToken]) -> list[dict[str, Any]]:
        return [logprob_entry(token, self._options) for token in scored]

    def _response(self, status: str, blocks: Sequence[Block], usage: Usage | None) -> dict[str, Any]:
        request = self._request
        asked = {
            name: getattr(request, name)
            for name in ("instructions", "max_output_tokens", "temperature", "top_p", "user", "top_logprobs")
        }
        reasoning = request.reasoning.model_dump() if request.reasoning else {"effort": None, "summary": None}
        return {
            "id": self._head.request_id,
            "object": "response",
            "created_at": self._head.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": request.model,
            "output": [self._item(block, "completed") for block in blocks],
            **asked,
            "metadata": request.metadata or {},
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": reasoning,
            "store": False,
            "text": {"format": (request.text and request.text.format) or {"type": "text"}},
            "tool_choice": request.tool_choice or "auto",
            "tools": request.tools or [],
            "truncation": "disabled",
            "usage": _usage(usage) if usage else None,
        }


_EVENT_OF = {
    "text": "response.output_text",
    "reasoning": "response.reasoning_text",
    "call": "response.function_call_arguments",
}
_FIELD_OF = {"text": "text", "reasoning": "text", "call": "arguments"}


def _part_index(block: Block) -> dict[str, int]:
    return {} if block.kind == "call" else {"content_index": 0}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.num_cached_tokens or 0},
        "output_tokens": usage.num_completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.num_reasoning_tokens},
        "total_tokens": usage.num_prompt_tokens + usage.num_completion_tokens,
    }

"""POST /v1/messages: a body to its plan, and errors as this API writes them. On a pool thread."""

from __future__ import annotations

from functools import partial

import msgspec

from services.gateway.anthropic.answers import MessagesAnswer
from services.gateway.anthropic.requests import MessagesRequest, parse_count, parse_messages, to_chat
from services.gateway.errors import ApiError
from services.gateway.openai.chat import ChatPlanner
from services.gateway.plan import Api, Plan

_TYPE_OF_STATUS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class MessagesApi(Api):
    name = "messages"
    id_prefix = "msg"
    id_separator = "_"

    def __init__(self, planner: ChatPlanner) -> None:
        self._planner = planner

    def plan(self, body: bytes, context: int) -> Plan:
        return self._plan(parse_messages(body), context)

    def count(self, body: bytes, context: int) -> int:
        """Prompt tokens of a request."""
        return len(self._plan(parse_count(body), context).prompts[0].token_ids)

    def error_body(self, error: ApiError) -> bytes:
        return messages_error(error)

    def error_event(self, error: ApiError) -> bytes:
        return b"event: error\ndata: " + messages_error(error) + b"\n\n"

    def _plan(self, request: MessagesRequest, context: int) -> Plan:
        return self._planner.plan(
            to_chat(request),
            context,
            lambda options: partial(MessagesAnswer, options.num_prompt_tokens, options),
            "messages",
        )


def messages_error(error: ApiError) -> bytes:
    kind = _TYPE_OF_STATUS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": error.message}})

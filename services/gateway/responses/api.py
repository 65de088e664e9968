"""POST /v1/responses: a body to its plan. On a pool thread."""

from __future__ import annotations

from functools import partial

import msgspec

from services.gateway.errors import ApiError
from services.gateway.openai.chat import ChatPlanner
from services.gateway.plan import Api, Plan
from services.gateway.responses.answers import ResponsesAnswer
from services.gateway.responses.requests import parse_responses, to_chat


class ResponsesApi(Api):
    name = "responses"
    id_prefix = "resp"
    id_separator = "_"

    def __init__(self, planner: ChatPlanner) -> None:
        self._planner = planner

    def plan(self, body: bytes, context: int) -> Plan:
        request = parse_responses(body)
        chat = to_chat(request)
        return self._planner.plan(chat, context, lambda options: partial(ResponsesAnswer, request, options), "input")

    def error_event(self, error: ApiError) -> bytes:
        fields = {"code": error.code, "message": error.message, "param": error.param}
        return b"event: error\ndata: " + msgspec.json.encode({"type": "error"} | fields) + b"\n\n"

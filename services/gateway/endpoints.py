"""The small endpoints beside those that generate: tokens, models, version, load, and what is not served."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from services.gateway.anthropic.api import MessagesApi, messages_error
from services.gateway.errors import ApiError, InvalidRequest, NotFound
from services.gateway.exchange import Exchange
from services.gateway.gateway import VERSION, Gateway
from services.gateway.json_body import read_body
from services.gateway.openai.chat import ChatPlanner
from services.gateway.tenants.guard import identity_of

T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]


class TokenizeRequest(BaseModel):
    """Text or, with `messages`, a chat as /v1/chat/completions would render it."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: Any = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


_OF_A_CHAT = ("tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")


class DetokenizeRequest(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    model: str | None = None
    tokens: Any = None


class BodyEndpoint:
    """An ASGI application that reads a body as generation does: bounded, and worked on by the pool."""

    def __init__(
        self,
        gateway: Gateway,
        handle: Callable[[bytes], Any],
        error_body: Callable[[ApiError], bytes] = ApiError.encoded,
    ) -> None:
        self._gateway = gateway
        self._handle = handle
        self._error_body = error_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gateway = self._gateway
        config = gateway.config
        exchange = Exchange(scope, receive, send, gateway.new_request_id(), config.stall_timeout_s)
        try:
            body = await exchange.body(config.max_body_bytes, config.body_timeout_s)
            answer = await gateway.pool.run(config.prepare_timeout_s, self._handle, body)
            await exchange.answer(msgspec.json.encode(answer))
        except ApiError as error:
            await exchange.fail(error, self._error_body(error), b"")


class TokenApi:
    """What tokenize and detokenize answer. On pool threads."""

    def __init__(self, gateway: Gateway, planner: ChatPlanner) -> None:
        self._gateway = gateway
        self._planner = planner

    def tokenize(self, body: bytes) -> dict[str, Any]:
        request = read_body(body, TokenizeRequest, {}, ())
        self._check_model(request.model)
        if (request.prompt is None) == (request.messages is None):
            raise InvalidRequest("either prompt or messages must be given", param="prompt")
        for name in _OF_A_CHAT:
            if request.messages is None and getattr(request, name) is not None:
                raise InvalidRequest(f"{name} needs messages", param=name)
        ids = self._chat_ids(request) if request.messages is not None else self._text_ids(request)
        tokenizer = self._gateway.text.tokenizer
        strings = [tokenizer.spelling(i).decode(errors="replace") for i in ids] if request.return_token_strs else None
        limit = self._gateway.described_context_tokens()
        return {"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": strings}

    def detokenize(self, body: bytes) -> dict[str, Any]:
        request = read_body(body, DetokenizeRequest, {}, ())
        self._check_model(request.model)
        text, ids = self._gateway.text, request.tokens
        known = isinstance(ids, list) and all(type(i) is int and 0 <= i < text.config.vocab_size for i in ids)
        if not known:
            raise InvalidRequest("tokens must be a list of token ids", param="tokens")
        return {"prompt": text.tokenizer.decode_all(ids)}

    def _text_ids(self, request: TokenizeRequest) -> list[int]:
        special = request.add_special_tokens is not False
        return self._gateway.text.text_prompt(request.prompt or "", None, add_special_tokens=special)

    def _chat_ids(self, request: TokenizeRequest) -> list[int]:
        fields = request.model_dump(exclude={"prompt", "return_token_strs"}, exclude_none=True)
        fields["model"] = self._gateway.config.model_name
        return self._planner.tokenize(fields)

    def _check_model(self, name: str | None) -> None:
        if name is not None:
            self._planner.model.check_name(name)


def small_routes(gateway: Gateway, planner: ChatPlanner) -> list[Route]:
    tokens, messages = TokenApi(gateway, planner), MessagesApi(planner)

    def count(body: bytes) -> dict[str, int]:
        return {"input_tokens": messages.count(body, gateway.described_context_tokens())}

    async def version(_: Request) -> Response:
        return json_response({"version": VERSION})

    async def load(_: Request) -> Response:
        body = {"server_load": gateway.num_running, "queued": gateway.admission.num_queued}
        return json_response(body)

    def may_use(request: Request) -> bool:
        return identity_of(request.scope).may_use(gateway.config.model_name)

    async def one_model(request: Request) -> Response:
        name = request.path_params["name"]
        if name != gateway.config.model_name or not may_use(request):
            raise NotFound(f"The model {name!r} does not exist", param="model", code="model_not_found")
        return json_response(_model(gateway))

    async def models(request: Request) -> Response:
        return json_response({"object": "list", "data": [_model(gateway)] if may_use(request) else []})

    return [
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", one_model),
        Route("/tokenize", BodyEndpoint(gateway, tokens.tokenize), methods=["POST"]),
        Route("/detokenize", BodyEndpoint(gateway, tokens.detokenize), methods=["POST"]),
        Route("/v1/messages/count_tokens", BodyEndpoint(gateway, count, messages_error), methods=["POST"]),
        Route("/version", version),
        Route("/load", load),
        *(Route(path, _not_served(what), methods=["POST"]) for path, what in _NOT_SERVED.items()),
    ]


_NOT_SERVED = {
    "/v1/embeddings": "embeddings",
    "/v1/audio/speech": "speech",
    "/v1/audio/transcriptions": "transcriptions",
    "/v1/images/generations": "images",
    "/v1/moderations": "moderations",
}


def _not_served(what: str) -> Handler:
    async def refuse(_: Request) -> Response:
        raise InvalidRequest(f"this server generates text only: {what} are not served", code="unsupported_endpoint")

    return refuse


def _model(gateway: Gateway) -> dict[str, Any]:
    return {
        "id": gateway.config.model_name,
        "object": "model",
        "created": gateway.created,
        "owned_by": "kvbaton",
        "max_model_len": gateway.described_context_tokens(),
    }


def json_response(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")

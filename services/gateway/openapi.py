"""Our own OpenAPI document, made from the classes that check the requests. Pure."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from pydantic import BaseModel

from services.gateway.anthropic import requests as anthropic
from services.gateway.endpoints import DetokenizeRequest, TokenizeRequest
from services.gateway.json_body import Neutral
from services.gateway.openai import requests as openai
from services.gateway.responses import requests as responses

REFUSALS = ("400", "401", "403", "404", "408", "413", "415", "429", "500", "503", "504")
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type"],
            "properties": {"message": {"type": "string"}, "type": {"type": "string"}},
        }
    },
}


def openapi_document(version: str, model_name: str, *, needs_key: bool) -> dict[str, Any]:
    schemas: dict[str, Any] = {"Error": _ERROR}
    unsupported_chat, unsupported_completion = openai.UNSUPPORTED_CHAT, openai.UNSUPPORTED_COMPLETION
    bodies: list[tuple[str, type[BaseModel], Neutral, Collection[str], bool]] = [
        ("/v1/chat/completions", openai.ChatRequest, unsupported_chat, openai.IGNORED, True),
        ("/v1/completions", openai.CompletionRequest, unsupported_completion, openai.IGNORED, True),
        ("/v1/responses", responses.ResponsesRequest, responses.UNSUPPORTED, responses.IGNORED, True),
        ("/v1/messages", anthropic.MessagesRequest, anthropic.UNSUPPORTED, anthropic.IGNORED, True),
        ("/v1/messages/count_tokens", anthropic.CountRequest, anthropic.UNSUPPORTED, anthropic.IGNORED, False),
        ("/tokenize", TokenizeRequest, {}, (), False),
        ("/detokenize", DetokenizeRequest, {}, (), False),
    ]
    paths: dict[str, Any] = {}
    for path, model, unsupported, ignored, streams in bodies:
        schemas |= _schemas(model, model_name, unsupported, ignored)
        paths[path] = {"post": _operation(path, model.__name__, streams=streams)}
    for path in ("/v1/models", "/version", "/load", "/health"):
        paths[path] = {"get": _operation(path)}
    return {
        "openapi": "3.1.0",
        "info": {"title": "kvbaton", "version": version},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{"key": []}] if needs_key else [],
    }


def _operation(path: str, body: str | None = None, *, streams: bool = False) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    refused = {"description": "refused", "content": {"application/json": {"schema": _ref("Error")}}}
    found: dict[str, Any] = {
        "operationId": path.strip("/").replace("/", "_"),
        "responses": {"200": {"description": "the answer", "content": content}} | dict.fromkeys(REFUSALS, refused),
    }
    if body is not None:
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": _ref(body)}}}
    return found


def _schemas(model: type[BaseModel], model_name: str, unsupported: Neutral, ignored: Collection[str]) -> dict[str, Any]:
    """Of a body and the classes inside it, by name."""
    schema: dict[str, Any] = model.model_json_schema(ref_template="#/components/schemas/{model}")
    inner: dict[str, Any] = schema.pop("$defs", {})
    schema["properties"]["model"] = {"enum": [model_name]}
    schema["properties"] |= {name: {"enum": [None, *values]} for name, values in unsupported.items()}
    schema["properties"] |= {name: {"description": "accepted, without effect"} for name in sorted(ignored)}
    return {model.__name__: schema} | inner


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}

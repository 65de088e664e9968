"""What the bodies of /v1/chat/completions and /v1/completions may say. Pure.

Every field is supported, accepted and ignored (IGNORED), accepted only with the value that asks for nothing
(UNSUPPORTED), or refused by name: nothing is overlooked in silence. Types are strict: true is no integer, 2.0 is no
integer, "5" is no number. Values are checked by `services.gateway.openai.sampling`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from services.gateway.errors import InvalidRequest

MAX_JSON_DEPTH = 16
IGNORED = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
)
"""Accepted and without effect: they do not change what is generated."""

_UNSUPPORTED_SHARED: dict[str, tuple[Any, ...]] = {"n": (1,)}
UNSUPPORTED_CHAT: dict[str, tuple[Any, ...]] = _UNSUPPORTED_SHARED | {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
}
UNSUPPORTED_COMPLETION: dict[str, tuple[Any, ...]] = _UNSUPPORTED_SHARED | {
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
}
"""Refused, except with null or a value listed here, which asks for what is done anyway."""


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    """Accepted; no padding is ever added."""


class GenerationRequest(BaseModel):
    """Fields of both endpoints. `stop` and `logit_bias` are checked where they are converted."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    ignore_eos: bool | None = None
    stop: Any = None
    stop_token_ids: list[int] | None = None
    logit_bias: Any = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class ChatRequest(GenerationRequest):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    """Wins over max_tokens."""
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)


class CompletionRequest(GenerationRequest):
    prompt: Any = None
    logprobs: int | None = Field(None, ge=0, le=20)


RequestT = TypeVar("RequestT", bound=GenerationRequest)


def parse_chat(body: bytes) -> ChatRequest:
    return _validated(ChatRequest, _fields(body, UNSUPPORTED_CHAT))


def parse_completion(body: bytes) -> CompletionRequest:
    return _validated(CompletionRequest, _fields(body, UNSUPPORTED_COMPLETION))


def _fields(body: bytes, unsupported: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    fields = decode_object(body)
    for name in fields.keys() & unsupported.keys():
        value = fields.pop(name)
        if value is not None and not any(type(value) is type(same) and value == same for same in unsupported[name]):
            raise InvalidRequest(f"{name} is not supported with this value", param=name)
    for name in fields.keys() & IGNORED:
        del fields[name]
    return fields


def decode_object(body: bytes) -> dict[str, Any]:
    """A JSON object of bounded depth, or InvalidRequest."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise InvalidRequest(f"the body is nested deeper than {MAX_JSON_DEPTH} levels", code="invalid_json") from None
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object", code="invalid_json")
    level: list[Any] = [value]
    for _ in range(MAX_JSON_DEPTH):
        level = [inner for outer in level for inner in _containers(outer)]
        if not level:
            return value
    raise InvalidRequest(f"the body is nested deeper than {MAX_JSON_DEPTH} levels", code="invalid_json")


def _containers(value: Any) -> list[Any]:
    inner = value.values() if isinstance(value, dict) else value
    return [item for item in inner if isinstance(item, dict | list)]


def _validated(model: type[RequestT], fields: dict[str, Any]) -> RequestT:
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
        param = param_path(problem["loc"])
        if problem["type"] == "extra_forbidden":
            raise InvalidRequest(f"Unrecognized request argument supplied: {param}", param=param) from None
        if problem["type"] == "missing":
            message = f"you must provide a {param} parameter"
        else:
            message = f"{param}: {problem['msg']}"
        raise InvalidRequest(message, param=param) from None


def param_path(location: tuple[int | str, ...]) -> str:
    """("messages", 0, "content") as messages[0].content."""
    path = ""
    for step in location:
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else step
    return path

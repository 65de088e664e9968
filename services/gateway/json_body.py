"""A request body: JSON of bounded depth, then a pydantic model of strict types. Pure.

Every field is supported, accepted and ignored (`ignored`), accepted only with a value that asks for nothing
(`unsupported`), or refused by name: nothing is overlooked in silence.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError

from services.gateway.errors import InvalidRequest

MAX_JSON_DEPTH = 64
ModelT = TypeVar("ModelT", bound=BaseModel)
Neutral = Mapping[str, tuple[Any, ...]]


def read_body(body: bytes, model: type[ModelT], unsupported: Neutral, ignored: Collection[str]) -> ModelT:
    """Raises InvalidRequest that names the first field that is wrong."""
    fields = decode_object(body)
    refuse_unsupported(fields, unsupported)
    for name in fields.keys() & ignored:
        del fields[name]
    return validated(model, fields)


def refuse_unsupported(fields: dict[str, Any], unsupported: Neutral) -> None:
    """Takes the fields out that may only have a neutral value (or null), or raises."""
    for name in sorted(fields.keys() & unsupported.keys()):
        value = fields.pop(name)
        if value is not None and not any(type(value) is type(same) and value == same for same in unsupported[name]):
            raise InvalidRequest(f"{name} is not supported with this value", param=name)


def text_at(value: Any, path: str) -> str:
    """The string that a body has at `path`. Raises InvalidRequest, which names it."""
    if not isinstance(value, str):
        raise InvalidRequest(f"{path} must be a string", param=path)
    return value


def decode_object(body: bytes) -> dict[str, Any]:
    """A JSON object of bounded depth, or InvalidRequest."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise _too_deep() from None
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object", code="invalid_json")
    level: list[Any] = [value]
    for _ in range(MAX_JSON_DEPTH):
        level = [inner for outer in level for inner in _containers(outer)]
        if not level:
            return value
    raise _too_deep()


def _too_deep() -> InvalidRequest:
    return InvalidRequest(f"the body is nested deeper than {MAX_JSON_DEPTH} levels", code="invalid_json")


def _containers(value: Any) -> list[Any]:
    inner = value.values() if isinstance(value, dict) else value
    return [item for item in inner if isinstance(item, dict | list)]


def validated(model: type[ModelT], fields: dict[str, Any], prefix: str = "") -> ModelT:
    """`prefix`: where in the body these fields stand."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
        param = param_path((*([prefix] if prefix else []), *problem["loc"]))
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

"""What a request says about the form of its output, read and checked. Pure.

response_format (OpenAI), guided_* and structured_outputs (vLLM): one of them, one constraint.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from services.gateway.errors import InvalidRequest

MAX_CHOICES = 1000
MAX_PATTERN_CHARS = 8192
Kind = Literal["json", "regex", "choice", "grammar"]
_FIELD_OF = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}


@dataclass(frozen=True, slots=True)
class Constraint:
    kind: Kind
    value: Any
    """A JSON schema, a regular expression, a list of strings, or a Lark grammar."""
    param: str
    """The field it came from."""


def read_constraint(
    response_format: Any, structured_outputs: dict[str, Any] | None, **guided: Any
) -> Constraint | None:
    """None: the output may be anything."""
    found = [_response_format(response_format)]
    found += [_read(_FIELD_OF[name], value, name) for name, value in guided.items() if value is not None]
    for name, value in (structured_outputs or {}).items():
        if value is not None:
            found.append(_structured_output(name, value))
    constraints = [constraint for constraint in found if constraint is not None]
    if len(constraints) > 1:
        message = f"{constraints[0].param} and {constraints[1].param} cannot be combined"
        raise InvalidRequest(message, param=constraints[1].param)
    return constraints[0] if constraints else None


def _response_format(form: Any) -> Constraint | None:
    if form is None:
        return None
    kind = form.get("type") if isinstance(form, dict) else None
    if kind == "text" and len(form) == 1:
        return None
    if kind == "json_object" and len(form) == 1:
        return Constraint("json", {"type": "object"}, "response_format")
    if kind != "json_schema":
        message = "response_format.type must be text, json_object or json_schema"
        raise InvalidRequest(message, param="response_format.type")
    return _json_schema(form.get("json_schema"), "response_format.json_schema")


def _json_schema(wrapped: Any, path: str) -> Constraint:
    """OpenAI's wrapping: {"name", "description", "strict", "schema"}. The schema is followed, strict or not."""
    if not isinstance(wrapped, dict) or set(wrapped) - {"name", "description", "strict", "schema"}:
        raise InvalidRequest(f"{path} must have a name and a schema", param=path)
    if not isinstance(wrapped.get("name"), str):
        raise InvalidRequest(f"{path}.name must be a string", param=f"{path}.name")
    schema = wrapped.get("schema")
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{path}.schema must be an object", param=f"{path}.schema")
    return Constraint("json", schema, f"{path}.schema")


def _structured_output(name: str, value: Any) -> Constraint:
    path = f"structured_outputs.{name}"
    if name == "json_object":
        if value is not True:
            raise InvalidRequest(f"{path} must be true", param=path)
        return Constraint("json", {"type": "object"}, path)
    if name not in ("json", "regex", "choice", "grammar"):
        raise InvalidRequest(f"{path} is not supported", param=path)
    return _read(name, value, path)


def _read(kind: str, value: Any, path: str) -> Constraint:
    match kind, value:
        case "json", dict():
            return Constraint("json", value, path)
        case "json", str():
            return Constraint("json", _decoded(value, path), path)
        case "choice", [*choices] if 0 < len(choices) <= MAX_CHOICES and all(isinstance(c, str) and c for c in choices):
            return Constraint("choice", choices, path)
        case "regex" | "grammar", str() if 0 < len(value) <= MAX_PATTERN_CHARS:
            return Constraint("regex" if kind == "regex" else "grammar", value, path)
    expected = {
        "json": "a JSON schema",
        "choice": f"a list of 1 to {MAX_CHOICES} strings",
        "regex": f"a regular expression of up to {MAX_PATTERN_CHARS} characters",
        "grammar": f"a Lark grammar of up to {MAX_PATTERN_CHARS} characters",
    }
    raise InvalidRequest(f"{path} must be {expected[kind]}", param=path)


def _decoded(text: str, path: str) -> dict[str, Any]:
    try:
        schema = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        schema = None
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{path} must be a JSON schema", param=path)
    return schema

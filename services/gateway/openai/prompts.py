"""What a request says the model should read: chat messages or a prompt, checked. Pure.

A message's content is a string, null (the same as "") or a list of text parts, which are joined by a line break.
"""

from __future__ import annotations

from typing import Any

import msgspec

from services.gateway.errors import InvalidRequest
from services.gateway.json_body import text_at

PART_SEPARATOR = "\n"
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""The role a template is given. OpenAI's "developer" is the successor of "system", which templates know."""
_PASSED_ON = ("name", "tool_call_id", "reasoning_content")
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "function_call": (None,),
    "audio": (None,),
    "refusal": (None,),
    "annotations": (None, []),
}
"""Fields that clients send back from an answer of ours: accepted while they say nothing."""
MAX_TOOL_CALLS = 128

Prompt = str | list[int]


def read_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As templates expect them."""
    if not messages:
        raise InvalidRequest("messages must not be empty", param="messages")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: dict[str, Any], path: str) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidRequest(f"{path}.role must be one of {', '.join(_ROLES)}", param=f"{path}.role")
    read: dict[str, Any] = {"role": _ROLES[role], "content": _content(message.get("content"), f"{path}.content")}
    for name, value in message.items():
        if name in ("role", "content"):
            continue
        if name in _PASSED_ON:
            if value is not None:
                read[name] = text_at(value, f"{path}.{name}")
        elif name == "tool_calls":
            if value:
                read[name] = _tool_calls(value, role, f"{path}.{name}")
        elif name not in _UNSUPPORTED:
            raise InvalidRequest(f"Unrecognized field: {path}.{name}", param=f"{path}.{name}")
        elif value not in _UNSUPPORTED[name]:
            raise InvalidRequest(f"{path}.{name} is not supported", param=f"{path}.{name}")
    return read


def _tool_calls(calls: Any, role: str, path: str) -> list[dict[str, Any]]:
    """Arguments as objects, which is how templates write them; clients send them as JSON text."""
    if role != "assistant" or not isinstance(calls, list) or len(calls) > MAX_TOOL_CALLS:
        raise InvalidRequest(f"{path} must be a list of an assistant's calls, up to {MAX_TOOL_CALLS}", param=path)
    return [_tool_call(call, f"{path}[{index}]") for index, call in enumerate(calls)]


def _tool_call(call: Any, path: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type", "function") != "function":
        raise InvalidRequest(f"{path} must be a call of a function", param=path)
    name = text_at(function.get("name"), f"{path}.function.name")
    arguments = text_at(function.get("arguments"), f"{path}.function.arguments")
    try:
        parsed = msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise InvalidRequest(
            f"{path}.function.arguments must be a JSON object as text", param=f"{path}.function.arguments"
        )
    read: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": parsed}}
    if call.get("id") is not None:
        read["id"] = text_at(call["id"], f"{path}.id")
    return read


def _content(content: Any, path: str) -> str:
    if content is None:
        return ""
    if isinstance(content, list):
        return PART_SEPARATOR.join(_part(part, f"{path}[{index}]") for index, part in enumerate(content))
    return text_at(content, path)


def _part(part: Any, path: str) -> str:
    if not isinstance(part, dict):
        raise InvalidRequest(f"{path} must be an object", param=path)
    if part.get("type") != "text":
        raise InvalidRequest(f"{path}.type must be text, got {_shown(part.get('type'))}", param=f"{path}.type")
    for name in part:
        if name not in ("type", "text"):
            raise InvalidRequest(f"Unrecognized field: {path}.{name}", param=f"{path}.{name}")
    return text_at(part.get("text"), f"{path}.text")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "..."


MAX_PROMPTS = 128


def read_prompts(prompt: Any, vocab_size: int) -> list[Prompt]:
    """A text, a list of token ids, or a list of several of either."""
    if prompt is None:
        raise InvalidRequest("you must provide a prompt parameter", param="prompt")
    if not (isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list)):
        return [_prompt(prompt, vocab_size)]
    if len(prompt) > MAX_PROMPTS:
        raise InvalidRequest(f"prompt has {len(prompt)} prompts, the limit is {MAX_PROMPTS}", param="prompt")
    return [_prompt(one, vocab_size) for one in prompt]


def _prompt(prompt: Any, vocab_size: int) -> Prompt:
    if isinstance(prompt, str):
        return prompt
    # Exact types, because True is an int to isinstance.
    if not isinstance(prompt, list) or set(map(type, prompt)) - {int}:
        raise InvalidRequest("prompt must be text, a list of token ids, or a list of several of either", param="prompt")
    if not prompt:
        raise InvalidRequest("prompt must not be empty", param="prompt")
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        raise InvalidRequest(f"prompt holds a token id that is not between 0 and {vocab_size - 1}", param="prompt")
    return prompt

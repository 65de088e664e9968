"""What a request says the model should read: chat messages or a prompt, checked. Pure.

A message's content is a string, null (the same as "") or a list of text parts, which are joined by a line break.
"""

from __future__ import annotations

from typing import Any

from services.gateway.errors import InvalidRequest

PART_SEPARATOR = "\n"
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""The role a template is given. OpenAI's "developer" is the successor of "system", which templates know."""
_PASSED_ON = ("name", "tool_call_id")
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "tool_calls": (None, []),
    "function_call": (None,),
    "audio": (None,),
    "refusal": (None,),
    "annotations": (None, []),
    "reasoning_content": (None, ""),
}
"""Fields that clients send back from an answer of ours: accepted while they say nothing."""

Prompt = str | list[int]


def read_messages(messages: list[dict[str, Any]]) -> list[dict[str, str]]:
    if not messages:
        raise InvalidRequest("messages must not be empty", param="messages")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: dict[str, Any], path: str) -> dict[str, str]:
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidRequest(f"{path}.role must be one of {', '.join(_ROLES)}", param=f"{path}.role")
    read = {"role": _ROLES[role], "content": _content(message.get("content"), f"{path}.content")}
    for name, value in message.items():
        if name in ("role", "content"):
            continue
        if name in _PASSED_ON:
            if value is not None:
                read[name] = _string(value, f"{path}.{name}")
        elif name not in _UNSUPPORTED:
            raise InvalidRequest(f"Unrecognized field: {path}.{name}", param=f"{path}.{name}")
        elif value not in _UNSUPPORTED[name]:
            raise InvalidRequest(f"{path}.{name} is not supported", param=f"{path}.{name}")
    return read


def _content(content: Any, path: str) -> str:
    if content is None:
        return ""
    if isinstance(content, list):
        return PART_SEPARATOR.join(_part(part, f"{path}[{index}]") for index, part in enumerate(content))
    return _string(content, path)


def _part(part: Any, path: str) -> str:
    if not isinstance(part, dict):
        raise InvalidRequest(f"{path} must be an object", param=path)
    if part.get("type") != "text":
        raise InvalidRequest(f"{path}.type must be text, got {_shown(part.get('type'))}", param=f"{path}.type")
    for name in part:
        if name not in ("type", "text"):
            raise InvalidRequest(f"Unrecognized field: {path}.{name}", param=f"{path}.{name}")
    return _string(part.get("text"), f"{path}.text")


def _string(value: Any, path: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"{path} must be a string", param=path)
    return value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "..."


def read_prompt(prompt: Any, vocab_size: int) -> Prompt:
    """A text or a list of token ids; a list of one of either is that one."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) != 1:
            raise InvalidRequest("several prompts in one request are not supported", param="prompt")
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list):
        raise InvalidRequest("prompt must be a string or a list of token ids", param="prompt")
    if not prompt:
        raise InvalidRequest("prompt must not be empty", param="prompt")
    # Exact types, because True is an int to isinstance.
    if set(map(type, prompt)) != {int}:
        raise InvalidRequest("prompt must be a string or a list of token ids", param="prompt")
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        raise InvalidRequest(f"prompt holds a token id that is not between 0 and {vocab_size - 1}", param="prompt")
    return prompt

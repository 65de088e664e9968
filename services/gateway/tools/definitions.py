"""The `tools` and `tool_choice` of a request, checked. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from services.gateway.errors import InvalidRequest

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_FIELDS = {"name", "description", "parameters", "strict"}


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    definition: dict[str, Any]
    """As templates show it: {"type": "function", "function": {...}}."""

    @property
    def parameters(self) -> dict[str, Any]:
        """A JSON schema."""
        return self.definition["function"].get("parameters") or {"type": "object"}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What may be called. `mode`: auto leaves it to the model; required has it call something."""

    tools: tuple[Tool, ...] = ()
    mode: Literal["auto", "required"] = "auto"
    one_only: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(tool.name for tool in self.tools)

    @property
    def definitions(self) -> list[dict[str, Any]] | None:
        return [tool.definition for tool in self.tools] or None


def read_tool_use(tools: Any, tool_choice: Any, parallel: bool | None) -> ToolUse:
    """With the choice "none" there are no tools: the model is not shown any. A named choice leaves one."""
    found = _read_tools(tools)
    if not found and tool_choice not in (None, "none", "auto"):
        raise InvalidRequest("tool_choice needs tools", param="tool_choice")
    one_only = parallel is False
    if tool_choice == "none" or not found:
        return ToolUse()
    if tool_choice in (None, "auto", "required"):
        return ToolUse(tuple(found), "required" if tool_choice == "required" else "auto", one_only)
    return ToolUse((_named(found, tool_choice),), "required", one_only=True)


def _named(tools: Sequence[Tool], choice: Any) -> Tool:
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if name is None or set(choice) - {"type", "function"}:
        raise InvalidRequest(
            'tool_choice must be "none", "auto", "required" or {"type": "function", "function": {"name": ...}}',
            param="tool_choice",
        )
    for tool in tools:
        if tool.name == name:
            return tool
    raise InvalidRequest(f"tool_choice names {name!r}, which is not among tools", param="tool_choice")


def _read_tools(tools: Any) -> list[Tool]:
    if tools is None:
        return []
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"tools must be a list of up to {MAX_TOOLS}", param="tools")
    found = [_read_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    if len({tool.name for tool in found}) != len(found):
        raise InvalidRequest("tools has two functions of the same name", param="tools")
    return found


def _read_tool(tool: Any, path: str) -> Tool:
    if not isinstance(tool, dict) or tool.get("type") != "function" or set(tool) != {"type", "function"}:
        raise InvalidRequest(f'{path} must be {{"type": "function", "function": {{...}}}}', param=path)
    function, path = tool["function"], f"{path}.function"
    if not isinstance(function, dict):
        raise InvalidRequest(f"{path} must be an object", param=path)
    for name in function:
        if name not in _FIELDS:
            raise InvalidRequest(f"Unrecognized field: {path}.{name}", param=f"{path}.{name}")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequest(f"{path}.name must match {_NAME.pattern}", param=f"{path}.name")
    if not isinstance(function.get("description"), str | None):
        raise InvalidRequest(f"{path}.description must be a string", param=f"{path}.description")
    if not isinstance(function.get("parameters"), dict | None):
        raise InvalidRequest(f"{path}.parameters must be a JSON schema", param=f"{path}.parameters")
    shown = {key: value for key, value in function.items() if value is not None and key != "strict"}
    return Tool(name, {"type": "function", "function": shown})

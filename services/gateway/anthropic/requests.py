"""The body of POST /v1/messages, and the chat that it asks for. Pure."""

from __future__ import annotations

from typing import Any

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from services.gateway.errors import InvalidRequest
from services.gateway.json_body import Neutral, read_body, text_at
from services.gateway.openai.prompts import PART_SEPARATOR
from services.gateway.openai.requests import ChatRequest
from services.gateway.openai.sampling import read_stops

IGNORED = frozenset({"metadata", "service_tier", "cache_control"})
UNSUPPORTED: Neutral = {
    "container": (),
    "mcp_servers": ([],),
    "context_management": (),
    "output_config": (),
    "diagnostics": (),
    "inference_geo": (),
    "speed": ("standard",),
}


class MessagesRequest(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    model: str
    messages: list[dict[str, Any]]
    max_tokens: int = Field(ge=1)
    system: Any = None
    stop_sequences: Any = None
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = None
    top_k: int | None = None
    tools: Any = None
    tool_choice: Any = None
    thinking: Any = None


class CountRequest(BaseModel):
    """Of POST /v1/messages/count_tokens."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str
    messages: list[dict[str, Any]]
    system: Any = None
    tools: Any = None
    tool_choice: Any = None
    thinking: Any = None


def parse_messages(body: bytes) -> MessagesRequest:
    return read_body(body, MessagesRequest, UNSUPPORTED, IGNORED)


def parse_count(body: bytes) -> MessagesRequest:
    """As a request for one token: what counts is its prompt."""
    count = read_body(body, CountRequest, UNSUPPORTED, IGNORED)
    return MessagesRequest(**count.model_dump(), max_tokens=1)


def to_chat(request: MessagesRequest) -> ChatRequest:
    """Raises InvalidRequest that names the field as this API calls it."""
    messages: list[dict[str, Any]] = []
    if request.system is not None:
        messages.append({"role": "system", "content": _text(request.system, "system")})
    if not request.messages:
        raise InvalidRequest("messages must not be empty", param="messages")
    for index, message in enumerate(request.messages):
        messages += _messages(message, f"messages[{index}]")
    choice, parallel = _tool_choice(request.tool_choice)
    return ChatRequest(
        model=request.model,
        messages=messages,
        max_completion_tokens=request.max_tokens,
        stream=request.stream,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        stop=list(read_stops(request.stop_sequences, "stop_sequences")),
        tools=_tools(request.tools),
        tool_choice=choice,
        parallel_tool_calls=parallel,
        chat_template_kwargs=_thinking(request.thinking),
    )


def _messages(message: dict[str, Any], path: str) -> list[dict[str, Any]]:
    """One of ours for a text, one more before it for each tool's result."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant") or set(message) - {"role", "content"}:
        raise InvalidRequest(f"{path} must have the role user or assistant, and content", param=path)
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise InvalidRequest(f"{path}.content must be text or a list of blocks", param=f"{path}.content")
    own: dict[str, Any] = {"role": role}
    texts: list[str] = []
    results: list[dict[str, Any]] = []
    for index, block in enumerate(content):
        where = f"{path}.content[{index}]"
        match role, block.get("type"):
            case _, "text":
                texts.append(text_at(block.get("text"), f"{where}.text"))
            case "user", "tool_result":
                results.append(_tool_result(block, where))
            case "assistant", "tool_use":
                own.setdefault("tool_calls", []).append(_tool_use(block, where))
            case "assistant", "thinking":
                own["reasoning_content"] = text_at(block.get("thinking"), f"{where}.thinking")
            case _:
                raise InvalidRequest(f"{where}.type is not supported", param=f"{where}.type")
    if texts or not results:
        results.append(own | {"content": PART_SEPARATOR.join(texts)})
    return results


def _tool_result(block: dict[str, Any], path: str) -> dict[str, Any]:
    call_id = text_at(block.get("tool_use_id"), f"{path}.tool_use_id")
    text = _text(block.get("content") or "", f"{path}.content")
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def _tool_use(block: dict[str, Any], path: str) -> dict[str, Any]:
    if not isinstance(block.get("input"), dict):
        raise InvalidRequest(f"{path}.input must be an object", param=f"{path}.input")
    function = {
        "name": text_at(block.get("name"), f"{path}.name"),
        "arguments": msgspec.json.encode(block["input"]).decode(),
    }
    return {"id": text_at(block.get("id"), f"{path}.id"), "type": "function", "function": function}


def _text(value: Any, path: str) -> str:
    """A string, or blocks of text."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise InvalidRequest(f"{path} must be text or a list of text blocks", param=path)
    return PART_SEPARATOR.join(_text_block(block, f"{path}[{index}]") for index, block in enumerate(value))


def _text_block(block: Any, path: str) -> str:
    if not isinstance(block, dict) or block.get("type") != "text":
        raise InvalidRequest(f"{path}.type must be text", param=f"{path}.type")
    return text_at(block.get("text"), f"{path}.text")


def _tools(tools: Any) -> Any:
    if not isinstance(tools, list):
        return tools
    return [_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]


def _tool(tool: Any, path: str) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type", "custom") != "custom":
        raise InvalidRequest(f"{path} must be a tool of the client's own", param=path)
    unknown = set(tool) - {"type", "name", "description", "input_schema", "cache_control"}
    if unknown:
        raise InvalidRequest(f"Unrecognized field: {path}.{sorted(unknown)[0]}", param=path)
    function = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": tool.get("input_schema"),
    }
    return {"type": "function", "function": function}


def _tool_choice(choice: Any) -> tuple[Any, bool | None]:
    """A chat's tool_choice, and whether calls in parallel are wanted."""
    if choice is None:
        return None, None
    kind = choice.get("type") if isinstance(choice, dict) else None
    known: dict[Any, Any] = {"auto": "auto", "any": "required", "none": "none"}
    if kind == "tool":
        known["tool"] = {"type": "function", "function": {"name": choice.get("name")}}
    if kind not in known:
        raise InvalidRequest("tool_choice.type must be auto, any, tool or none", param="tool_choice")
    return known[kind], not choice.get("disable_parallel_tool_use", False)


def _thinking(thinking: Any) -> dict[str, Any] | None:
    """As templates of models that can do either way ask it. The budget is the answer's own."""
    if thinking is None:
        return None
    kind = thinking.get("type") if isinstance(thinking, dict) else None
    if kind not in ("enabled", "disabled", "adaptive"):
        raise InvalidRequest("thinking.type must be enabled, adaptive or disabled", param="thinking")
    return {"enable_thinking": kind != "disabled"}

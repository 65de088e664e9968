"""The body of POST /v1/responses, and the chat that it asks for. Pure."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from services.gateway.errors import InvalidRequest
from services.gateway.json_body import Neutral, read_body, text_at
from services.gateway.openai.prompts import PART_SEPARATOR
from services.gateway.openai.requests import ChatRequest

IGNORED = frozenset(
    (
        *("store", "service_tier", "safety_identifier"),
        *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "request_id"),
    )
)
UNSUPPORTED: Neutral = {
    "background": (False,),
    "conversation": (),
    "previous_response_id": (),
    "prompt": (),
    "max_tool_calls": (),
    "truncation": ("disabled",),
    "context_management": ([],),
    "background_options": (),
    "access_programs": (),
    "moderation": (),
    "image": (),
    # vLLM's
    "stop": ([],),
    "ignore_eos": (False,),
    "logit_bias": ({},),
    "repetition_penalty": (1.0, 1),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "structured_outputs": (),
    "mm_processor_kwargs": ({},),
    "vllm_xargs": ({},),
    "enable_response_messages": (False,),
    "previous_input_messages": ([],),
    "previous_response": (),
}
LOGPROBS = "message.output_text.logprobs"
_INCLUDABLE = {LOGPROBS, "reasoning.encrypted_content"}
"""The second asks for what only a server that encrypts its reasoning has; ours is in the open."""


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    include_obfuscation: bool | None = None


class Reasoning(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    effort: str | None = Field(None, max_length=32)
    summary: str | None = None
    """Accepted: reasoning is given in full instead."""
    generate_summary: str | None = None


class Text(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    format: dict[str, Any] | None = None
    verbosity: None = None


class ResponsesRequest(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    model: str
    input: Any = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    text: Text | None = None
    tool_choice: Any = None
    tools: Any = None
    include: list[str] | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    top_p: float | None = None
    user: str | None = None
    seed: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    cache_salt: str | None = Field(None, min_length=1, max_length=256)
    priority: int | None = Field(None, ge=-(2**31), le=2**31 - 1)


def parse_responses(body: bytes) -> ResponsesRequest:
    return read_body(body, ResponsesRequest, UNSUPPORTED, IGNORED)


def to_chat(request: ResponsesRequest) -> ChatRequest:
    """Raises InvalidRequest that names the field as this API calls it."""
    messages = read_input(request.input)
    if request.instructions is not None:
        messages.insert(0, {"role": "system", "content": request.instructions})
    unknown = set(request.include or ()) - _INCLUDABLE
    if unknown:
        raise InvalidRequest(f"include may not ask for {sorted(unknown)[0]}", param="include")
    if request.max_output_tokens is not None and request.max_output_tokens < 1:
        raise InvalidRequest("max_output_tokens must be at least 1", param="max_output_tokens")
    scored = LOGPROBS in (request.include or ())
    return ChatRequest(
        model=request.model,
        messages=messages,
        max_completion_tokens=request.max_output_tokens,
        stream=request.stream,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        min_p=request.min_p,
        seed=request.seed,
        logprobs=True if scored or request.top_logprobs else None,
        top_logprobs=request.top_logprobs,
        tools=_tools(request.tools),
        tool_choice=_tool_choice(request.tool_choice),
        parallel_tool_calls=request.parallel_tool_calls,
        response_format=_response_format(request.text),
        reasoning_effort=request.reasoning.effort if request.reasoning else None,
        cache_salt=request.cache_salt,
        priority=request.priority,
    )


def read_input(given: Any) -> list[dict[str, Any]]:
    """As messages of a chat. Calls are put into the assistant's message before them."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise InvalidRequest("input must be text or a list of items", param="input")
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(given):
        _add_item(messages, item, f"input[{index}]")
    return messages


def _add_item(messages: list[dict[str, Any]], item: Any, path: str) -> None:
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if kind == "message":
        role = item.get("role")
        if role not in ("user", "assistant", "system", "developer"):
            raise InvalidRequest(f"{path}.role must be user, assistant, system or developer", param=f"{path}.role")
        content = _content(item.get("content"), f"{path}.content")
        if role == "assistant" and messages and "content" not in messages[-1]:
            messages[-1]["content"] = content
        else:
            messages.append({"role": role, "content": content})
    elif kind == "function_call":
        function = {name: text_at(item.get(name), f"{path}.{name}") for name in ("name", "arguments")}
        call = {"id": text_at(item.get("call_id"), f"{path}.call_id"), "type": "function", "function": function}
        _assistant(messages).setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        call_id = text_at(item.get("call_id"), f"{path}.call_id")
        output = _content(item.get("output"), f"{path}.output")
        messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
    elif kind == "reasoning":
        parts = [part for part in item.get("content") or () if isinstance(part, dict)]
        thought = PART_SEPARATOR.join(text_at(part.get("text"), f"{path}.content") for part in parts)
        messages.append({"role": "assistant", "reasoning_content": thought})
    else:
        raise InvalidRequest(f"{path}.type is not supported", param=f"{path}.type")


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant's message that a call belongs to."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant"})
    return messages[-1]


def _content(content: Any, path: str) -> str:
    if isinstance(content, list):
        return PART_SEPARATOR.join(_part(part, f"{path}[{index}]") for index, part in enumerate(content))
    return text_at(content, path)


def _part(part: Any, path: str) -> str:
    if not isinstance(part, dict) or part.get("type") not in ("input_text", "output_text", "text"):
        raise InvalidRequest(f"{path}.type must be input_text or output_text", param=f"{path}.type")
    return text_at(part.get("text"), f"{path}.text")


def _tools(tools: Any) -> Any:
    """From {"type", "name", "parameters", ...} to the shape of a chat's. What is neither is left to its check."""
    if not isinstance(tools, list):
        return tools
    return [_tool(tool) if isinstance(tool, dict) and tool.get("type") == "function" else tool for tool in tools]


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _tool_choice(choice: Any) -> Any:
    if isinstance(choice, dict) and set(choice) == {"type", "name"}:
        return {"type": choice["type"], "function": {"name": choice["name"]}}
    return choice


def _response_format(text: Text | None) -> Any:
    form = text.format if text else None
    if form is None or form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {name: value for name, value in form.items() if name != "type"}}

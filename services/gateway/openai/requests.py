"""What the bodies of /v1/chat/completions and /v1/completions may say. Pure.

Types are strict: true is no integer, 2.0 is no integer, "5" is no number. Values are checked by
`services.gateway.openai.sampling`. The fields beyond OpenAI's are vLLM's, by its names.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from services.gateway.json_body import Neutral, read_body

MAX_N = 128
_OPENAI_IGNORED = (
    *("user", "metadata", "store", "service_tier", "safety_identifier"),
    *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
)
IGNORED = frozenset((*_OPENAI_IGNORED, "request_id", "session_id"))
"""Accepted and without effect: they do not change what is generated. The last two are vLLM's; ids are ours."""

_UNSUPPORTED_SHARED: Neutral = {
    "use_beam_search": (False,),
    "length_penalty": (1.0, 1),
    "early_stopping": (False,),
    "spaces_between_special_tokens": (True,),
    "detokenize": (True,),
    "logits_processors": ([],),
    "prompt_logprobs": (),
    "allowed_tokens": (),
    "kv_transfer_params": (),
    "ec_transfer_params": (),
    "vllm_xargs": ({},),
    "guided_decoding_backend": ("llguidance", "guidance", "auto"),
    "guided_whitespace_pattern": (),
    "watermarking": (False,),
    "truncation_side": ("left",),
    "logprob_token_ids": (),
    "thinking_token_budget": (-1,),
    "repetition_detection": (),
    "stream_interval": (1,),
    "routed_experts_prompt_start": (0,),
    "return_token_offsets": (False,),
    "return_mm_kwargs": (True,),
}
UNSUPPORTED_CHAT: Neutral = {
    **_UNSUPPORTED_SHARED,
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "verbosity": (),
    "web_search_options": (),
    "best_of": (1,),
    "echo": (False,),
    "chat_template": (),
    "documents": ([],),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
    "include_reasoning": (True,),
    "return_prompt_text": (False,),
    "moderation": (),
}
UNSUPPORTED_COMPLETION: Neutral = {
    **_UNSUPPORTED_SHARED,
    "suffix": ("",),
    "prompt_embeds": (),
}
"""Refused, except with null or a value listed here, which asks for what is done anyway."""


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    """Accepted; no padding is ever added."""


class GenerationRequest(BaseModel):
    """Fields of both endpoints. Those of type Any are checked where they are converted."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str
    n: int | None = Field(None, ge=1, le=MAX_N)
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
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: Any = None
    bad_words: Any = None
    allowed_token_ids: list[int] | None = None
    response_format: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    structured_outputs: dict[str, Any] | None = None
    truncate_prompt_tokens: int | None = Field(None, ge=1)
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    cache_salt: str | None = Field(None, min_length=1, max_length=256)
    priority: int | None = Field(None, ge=-(2**31), le=2**31 - 1)

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class ChatRequest(GenerationRequest):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    """Wins over max_tokens."""
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = Field(None, max_length=32)
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class CompletionRequest(GenerationRequest):
    prompt: Any = None
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool | None = None
    best_of: int | None = None


def parse_chat(body: bytes) -> ChatRequest:
    return read_body(body, ChatRequest, UNSUPPORTED_CHAT, IGNORED)


def parse_completion(body: bytes) -> CompletionRequest:
    return read_body(body, CompletionRequest, UNSUPPORTED_COMPLETION, IGNORED)

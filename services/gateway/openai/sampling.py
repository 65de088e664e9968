"""From a request's fields to `services.protocol.Sampling`, every limit checked. Pure."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from engine import errors as engine_errors
from services.gateway.errors import ContextTooLong, InvalidRequest
from services.gateway.openai.requests import ChatRequest, CompletionRequest, GenerationRequest
from services.gateway.text.generation_defaults import GenerationDefaults
from services.protocol import Sampling
from services.sampling import engine_params

MAX_STOPS = 16
"""OpenAI takes 4, vLLM any number; each one costs every character of the answer a look."""
MAX_STOP_CHARS = 1000
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 256
DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default for /v1/completions. A chat without max_tokens may fill the context."""

Encode = Callable[[str], list[int]]
"""The tokens of a text, without special ones."""


@dataclass(frozen=True, slots=True)
class SamplingModel:
    """What the model has to do with the reading of sampling fields."""

    vocab_size: int
    eos_token_ids: Sequence[int]
    encode: Encode
    defaults: GenerationDefaults


def read_stops(stop: Any, param: str = "stop") -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else stop if isinstance(stop, list) else [] if stop is None else None
    if stops is None or len(stops) > MAX_STOPS:
        raise InvalidRequest(f"{param} must be a string or a list of up to {MAX_STOPS} strings", param=param)
    for text in stops:
        if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_CHARS:
            raise InvalidRequest(f"each of {param} must be a string of 1 to {MAX_STOP_CHARS} characters", param=param)
    return tuple(stops)


def num_logprobs(request: GenerationRequest) -> int | None:
    """How many alternatives a token is to be listed with; None for no log probabilities at all."""
    if isinstance(request, CompletionRequest):
        return request.logprobs
    assert isinstance(request, ChatRequest)
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
    return (request.top_logprobs or 0) if request.logprobs else None


def requested_tokens(request: GenerationRequest) -> tuple[str, int | None]:
    """The field that bounds the output and its value; None leaves it to the context. 0 only with `echo`, which
    then is all of the answer."""
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        name, value = "max_completion_tokens", request.max_completion_tokens
    elif request.max_tokens is not None:
        name, value = "max_tokens", request.max_tokens
    elif isinstance(request, CompletionRequest):
        return "max_tokens", None
    else:
        return "max_completion_tokens", None
    least = 0 if isinstance(request, CompletionRequest) and request.echo else 1
    if value < least:
        raise InvalidRequest(f"{name} must be at least {least}, got {value}", param=name)
    return name, value


def fit_max_tokens(request: GenerationRequest, num_prompt_tokens: int, context_tokens: int) -> int:
    """The output tokens this request may have. Raises ContextTooLong naming the limit and what was asked for."""
    name, value = requested_tokens(request)
    left = context_tokens - num_prompt_tokens
    param = "messages" if isinstance(request, ChatRequest) else "prompt"
    if left < 1:
        raise ContextTooLong(
            f"This model's maximum context length is {context_tokens} tokens, but the prompt has "
            f"{num_prompt_tokens} and at least 1 is needed for the answer.",
            param=param,
        )
    if value is None:
        return min(left, DEFAULT_COMPLETION_TOKENS) if isinstance(request, CompletionRequest) else left
    if value > left:
        raise ContextTooLong(
            f"This model's maximum context length is {context_tokens} tokens, but {num_prompt_tokens + value} were "
            f"requested: {num_prompt_tokens} in the prompt and {value} in {name}.",
            param=name if num_prompt_tokens < context_tokens else param,
        )
    return value


def to_sampling(request: GenerationRequest, max_tokens: int, model: SamplingModel, grammar: str = "") -> Sampling:
    """A request without a seed gets a random one, so that every worker that takes part draws the same."""
    stop_token_ids = request.stop_token_ids or []
    if len(stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest(f"stop_token_ids has more than {MAX_STOP_TOKEN_IDS} ids", param="stop_token_ids")
    if request.allowed_token_ids is not None and not 0 < len(request.allowed_token_ids) <= model.vocab_size:
        raise InvalidRequest("allowed_token_ids must hold at least one token id", param="allowed_token_ids")
    ends = {*stop_token_ids, *(() if request.ignore_eos else model.eos_token_ids)}
    defaults = model.defaults
    sampling = Sampling(
        # 0 is served as a prompt and one token that is not shown.
        max_tokens=max(1, max_tokens),
        seed=secrets.randbits(63) if request.seed is None else request.seed,
        min_tokens=request.min_tokens or 0,
        temperature=_or(request.temperature, defaults.temperature),
        top_p=_or(request.top_p, defaults.top_p),
        # -1 is how vLLM spells "all".
        top_k=defaults.top_k if request.top_k is None else 0 if request.top_k == -1 else request.top_k,
        min_p=_or(request.min_p, defaults.min_p),
        repetition_penalty=_or(request.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=_or(request.presence_penalty, 0.0),
        frequency_penalty=_or(request.frequency_penalty, 0.0),
        logit_bias=_read_logit_bias(request.logit_bias),
        stop_token_ids=sorted(ends),
        logprobs=num_logprobs(request),
        bad_words=_read_bad_words(request.bad_words, model.encode),
        allowed_token_ids=sorted(set(request.allowed_token_ids or [])),
        grammar=grammar,
        prompt_logprobs=_prompt_logprobs(request),
    )
    _check_ranges(sampling, model.vocab_size)
    return sampling


def _prompt_logprobs(request: GenerationRequest) -> int | None:
    """An echoed prompt is listed as the output is."""
    return request.logprobs if isinstance(request, CompletionRequest) and request.echo else None


def _or(value: float | None, default: float) -> float:
    return float(default if value is None else value)


def _read_logit_bias(logit_bias: Any) -> dict[int, float]:
    if logit_bias is None:
        return {}
    if not isinstance(logit_bias, dict) or len(logit_bias) > MAX_LOGIT_BIAS:
        raise InvalidRequest(f"logit_bias must be an object of up to {MAX_LOGIT_BIAS} token ids", param="logit_bias")
    bias: dict[int, float] = {}
    for key, value in logit_bias.items():
        # ASCII digits only: int() also takes spaces, underscores and other scripts' digits.
        if not (key.isascii() and key.isdigit() and len(key) <= 10) or type(value) not in (int, float):
            raise InvalidRequest("logit_bias must map token ids to numbers", param="logit_bias")
        bias[int(key)] = float(value)
    return bias


def _read_bad_words(words: Any, encode: Encode) -> list[list[int]]:
    """The tokens of each word as it stands at the start of a text, and after a space."""
    if words is None:
        return []
    if not isinstance(words, list) or len(words) > MAX_BAD_WORDS:
        raise InvalidRequest(f"bad_words must be a list of up to {MAX_BAD_WORDS} strings", param="bad_words")
    found: list[list[int]] = []
    for word in words:
        if not isinstance(word, str) or not 0 < len(word) <= MAX_BAD_WORD_CHARS:
            problem = f"each of bad_words must be a string of 1 to {MAX_BAD_WORD_CHARS} characters"
            raise InvalidRequest(problem, param="bad_words")
        for spelled in (word, " " + word.lstrip(" ")):
            ids = encode(spelled)
            if ids and ids not in found:
                found.append(ids)
    return found


def _check_ranges(sampling: Sampling, vocab_size: int) -> None:
    try:
        engine_params(sampling).validate(vocab_size)
    except engine_errors.InvalidRequest as error:
        raise InvalidRequest(str(error), param=error.param) from None

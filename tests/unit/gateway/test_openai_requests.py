"""Request bodies: strict types, every limit with the name of its field, nothing overlooked in silence."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from services.gateway.errors import ApiError, ContextTooLong, InvalidRequest
from services.gateway.openai.requests import parse_chat, parse_completion
from services.gateway.openai.sampling import SamplingModel, fit_max_tokens, read_stops, requested_tokens, to_sampling
from services.gateway.text.generation_defaults import GenerationDefaults
from services.protocol import Sampling

EOS, VOCAB = (2,), 400
MODEL = SamplingModel(VOCAB, EOS, lambda text: list(text.encode()), GenerationDefaults())


def chat(**fields: Any) -> Sampling:
    request = parse_chat(json.dumps({"model": "m", "messages": [{}]} | fields).encode())
    read_stops(request.stop)
    return to_sampling(request, fit_max_tokens(request, 10, 100), MODEL)


def completion(**fields: Any) -> Sampling:
    request = parse_completion(json.dumps({"model": "m", "prompt": "a"} | fields).encode())
    read_stops(request.stop)
    return to_sampling(request, fit_max_tokens(request, 10, 100), MODEL)


BAD: list[tuple[str, Any]] = [
    *(("n", value) for value in (0, 129, 3_000_000, 2.0, True, "1", -1)),
    *(("max_tokens", value) for value in (0, -1, 1.0, True, "5", 2**70)),
    *(("min_tokens", value) for value in (-1, 91, True)),
    *(("temperature", value) for value in (-0.1, 2.1, 1e30, "1", True)),
    *(("top_p", value) for value in (-1, 0, 1.1)),
    *(("top_k", value) for value in (-2, 1.5)),
    *(("min_p", value) for value in (-0.1, 1.1)),
    *(("repetition_penalty", value) for value in (0, -1)),
    *(("presence_penalty", value) for value in (-2.1, 2.1)),
    *(("frequency_penalty", value) for value in (-2.1, 2.1)),
    *(("seed", value) for value in (2**63, 2**64, -(2**63) - 1, 1.0, True)),
    *(("stop", value) for value in (5, [""], "", ["a"] * 17, ["a"] * 400_000, "a" * 1_000_000, [5], {})),
    *(("stop_token_ids", value) for value in ([-1], [VOCAB], [2**40], [1.0], [1] * 1000, "1")),
    *(("logit_bias", value) for value in ([], {"a": 1}, {"-1": 1}, {"400": 1}, {"1": 101}, {"1": True}, {" 1": 1})),
    *(("logit_bias", value) for value in ({"٣": 1}, {"1" * 5000: 1}, {str(i): 0 for i in range(2000)})),
    *(("stream", value) for value in (1, "true")),
    *(("bad_words", value) for value in ("a", [""], [5], ["a"] * 129, ["a" * 257])),
    *(("allowed_token_ids", value) for value in ([], [-1], [VOCAB], [True], 5)),
    *(("truncate_prompt_tokens", value) for value in (0, -1, True)),
    *(("priority", value) for value in (2**31, "high")),
    *(("cache_salt", value) for value in ("", 5)),
    ("kv_transfer_params", {"remote_host": "10.0.0.1"}),
    ("use_beam_search", True),
    ("prompt_logprobs", 1),
    ("ignore_eos", 1),
    ("stream_options.colour", True),
    ("user_id", "unknown field"),
]


def _body(path: str, value: Any) -> dict[str, Any]:
    outer, _, inner = path.partition(".")
    return {outer: {inner: value} if inner else value}


@pytest.mark.parametrize("parse", [chat, completion])
@pytest.mark.parametrize(("param", "value"), BAD, ids=lambda value: repr(value)[:30])
def test_a_bad_value_is_refused_by_name(parse: Callable[..., Sampling], param: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse(**_body(param, value))
    assert (refused.value.param or "").split("[")[0] == param
    assert refused.value.status == 400


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("top_logprobs", -1),
        ("top_logprobs", 21),
        ("top_logprobs", 10**9),
        ("top_logprobs", 5),
        ("logprobs", 1),
        ("functions", [{"name": "f"}]),
        ("max_completion_tokens", 0),
        ("modalities", ["audio"]),
    ],
)
def test_what_only_chat_has_is_refused_by_name(param: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as refused:
        chat(**{param: value})
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("param", "value"),
    [("suffix", "x"), ("echo", 1), ("best_of", True), ("logprobs", 21), ("logprobs", True), ("logprobs", -1)],
)
def test_what_only_completions_have_is_refused_by_name(param: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as refused:
        completion(**{param: value})
    assert refused.value.param == param


def test_null_means_absent_and_neutral_values_are_no_request() -> None:
    names = ("n", "stop", "seed", "temperature", "top_p", "max_tokens", "logit_bias", "stream", "tools", "functions")
    chat(**dict.fromkeys(names))
    chat(n=1, tools=[], tool_choice="none", response_format={"type": "text"}, parallel_tool_calls=True)
    completion(echo=False, best_of=1, suffix=None)


@pytest.mark.parametrize("num_stops", [1, 4, 5, 16])
def test_up_to_16_strings_may_end_an_answer(num_stops: int) -> None:
    stops = [f"end {index}" for index in range(num_stops)]
    assert read_stops(stops) == tuple(stops)


def test_words_are_forbidden_with_and_without_a_space_before_them() -> None:
    assert chat(bad_words=["ab", " c"]).bad_words == [list(b"ab"), list(b" ab"), list(b" c")]


def test_the_models_own_defaults_hold_where_a_request_says_nothing() -> None:
    defaults = GenerationDefaults(temperature=0.6, top_p=0.9, top_k=20, min_p=0.1, repetition_penalty=1.1)
    model = SamplingModel(VOCAB, EOS, lambda text: [], defaults)

    def read(**fields: Any) -> Sampling:
        request = parse_chat(json.dumps({"model": "m", "messages": [{}]} | fields).encode())
        return to_sampling(request, 5, model)

    left_out, asked = read(), read(temperature=0, top_p=1, top_k=-1, min_p=0, repetition_penalty=1)
    assert (left_out.temperature, left_out.top_p, left_out.top_k) == (0.6, 0.9, 20)
    assert (left_out.min_p, left_out.repetition_penalty) == (0.1, 1.1)
    assert (asked.temperature, asked.top_p, asked.top_k, asked.min_p, asked.repetition_penalty) == (0, 1, 0, 0, 1)


def test_fields_that_change_nothing_are_accepted() -> None:
    chat(user="me", metadata={"a": "b"}, store=False, service_tier="auto")


def test_the_body_must_be_json_of_bounded_depth() -> None:
    deep = b'{"model":"m","messages":' + b"[" * 80 + b"]" * 80 + b"}"
    for body in (b"", b"{", b"[]", b"5", b'{"a": NaN}', b'{"a": "\xff"}', b"[" * 200_000, deep):
        with pytest.raises(ApiError) as refused:
            parse_chat(body)
        assert (refused.value.status, refused.value.code) == (400, "invalid_json"), body[:30]


def test_a_missing_field_is_named() -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_chat(b'{"messages": []}')
    assert refused.value.param == "model"


def test_limits_of_seeds_are_inclusive() -> None:
    assert chat(seed=2**63 - 1).seed == 2**63 - 1
    assert completion(seed=-(2**63)).seed == -(2**63)
    assert chat().seed != chat().seed, "a request without a seed gets one of its own"


def test_end_tokens_are_joined_with_the_clients_own_unless_ignored() -> None:
    assert chat(stop_token_ids=[9]).stop_token_ids == [2, 9]
    assert chat(stop_token_ids=[9], ignore_eos=True).stop_token_ids == [9]
    assert chat(ignore_eos=True).stop_token_ids == []


def test_how_long_an_answer_may_be() -> None:
    assert chat().max_tokens == 90, "a chat may fill the context"
    assert completion().max_tokens == 16, "OpenAI's default for completions"
    assert chat(max_tokens=5).max_tokens == chat(max_tokens=50, max_completion_tokens=5).max_tokens == 5
    assert chat(max_tokens=90).max_tokens == 90


def test_past_the_context_both_numbers_are_told() -> None:
    with pytest.raises(ContextTooLong, match=r"100 tokens, but 101 were requested: 10 .* and 91 ") as refused:
        chat(max_tokens=91)
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "max_tokens")
    request = parse_chat(b'{"model": "m", "messages": [{}]}')
    with pytest.raises(ContextTooLong, match=r"100 tokens, but the prompt has 100") as refused:
        fit_max_tokens(request, 100, 100)
    assert refused.value.param == "messages"


def test_logprobs_of_both_dialects() -> None:
    assert chat().logprobs is None
    assert chat(logprobs=False).logprobs is None
    assert chat(logprobs=True).logprobs == 0
    assert chat(logprobs=True, top_logprobs=3).logprobs == 3
    assert completion(logprobs=0).logprobs == 0
    assert completion(logprobs=2).logprobs == 2


def test_a_chat_must_have_room_for_one_token() -> None:
    request = parse_chat(b'{"model": "m", "messages": [{}], "max_tokens": 0}')
    with pytest.raises(InvalidRequest):
        requested_tokens(request)

"""The real openai client against the whole stack on a tiny model: good requests, bad ones, and what they leave."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.support.cluster import Cluster, running
from tests.support.tiny_model import make_tiny_model

NUM_BLOCKS, BLOCK = 12, 16
POOL_TOKENS = NUM_BLOCKS * BLOCK


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A pool smaller than the model's context of 512, so that both limits can be met."""
    model = make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")
    flags = ["--num-blocks", str(NUM_BLOCKS), "--block-size", str(BLOCK)]
    with running(
        model,
        ["prefill", "decode"],
        worker_flags={"prefill": flags, "decode": flags},
        gateway_flags=["--local-prefill-max-tokens", "4"],
    ) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def nothing_is_left(stack: Cluster) -> Iterator[None]:
    yield
    stack.assert_idle()


def chat(stack: Cluster, **fields: Any) -> Any:
    defaults: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 16,
        "temperature": 0,
    }
    return stack.client.chat.completions.create(**defaults | fields)


def test_a_chat_streamed_equals_the_same_chat_in_one_piece(stack: Cluster) -> None:
    whole = chat(stack)
    chunks = list(chat(stack, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == [
        whole.choices[0].finish_reason
    ]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens


def test_a_completion_streamed_equals_the_same_in_one_piece(stack: Cluster) -> None:
    fields: dict[str, Any] = {
        "model": "tiny",
        "prompt": "Naïve café 漢字 ",
        "max_tokens": 24,
        "temperature": 1.0,
        "seed": 5,
    }
    whole = stack.client.completions.create(**fields)
    pieces = stack.client.completions.create(**fields, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces if piece.choices) == whole.choices[0].text


def test_a_stop_string_cuts_before_it_streaming_or_not(stack: Cluster) -> None:
    text = chat(stack, max_tokens=24).choices[0].message.content
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    expected = text[: text.index(stop)]
    answer = chat(stack, max_tokens=24, stop=[stop])
    assert answer.choices[0].message.content == expected
    assert answer.choices[0].finish_reason == "stop"
    streamed = chat(stack, max_tokens=24, stop=stop, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == expected


def test_a_single_token_is_all_prefills_work(stack: Cluster) -> None:
    before = stack.of_role("decode")[0].ledger()["receiver"]["committed"]
    answer = chat(stack, max_tokens=1)
    assert answer.usage.completion_tokens == 1
    assert stack.of_role("decode")[0].ledger()["receiver"]["committed"] == before


def test_an_end_token_as_the_very_first_one_moves_no_kv(stack: Cluster) -> None:
    prompt = list(range(20, 60))
    first = stack.complete(prompt, max_tokens=1, temperature=0, logprobs=1, ignore_eos=True)
    assert first["usage"]["completion_tokens"] == 1
    before = stack.of_role("decode")[0].ledger()["receiver"]["committed"]
    biased = stack.complete(prompt, max_tokens=8, temperature=0, logit_bias={"2": 100}, stop_token_ids=[2])
    assert biased["choices"][0]["finish_reason"] == "stop"
    assert biased["choices"][0]["text"] == ""
    assert stack.of_role("decode")[0].ledger()["receiver"]["committed"] == before


LONGER_THAN_THE_POOL = list(range(100)) * 2
BAD: list[tuple[str, dict[str, Any], str, str | None]] = [
    ("/v1/completions", {"prompt": LONGER_THAN_THE_POOL}, "prompt", "context_length_exceeded"),
    ("/v1/completions", {"prompt": list(range(200)) * 3}, "prompt", "context_length_exceeded"),
    ("/v1/completions", {"prompt": [5] * 100, "max_tokens": 150}, "max_tokens", "context_length_exceeded"),
    ("/v1/completions", {"prompt": ""}, "prompt", None),
    ("/v1/completions", {"prompt": []}, "prompt", None),
    ("/v1/completions", {"prompt": {"text": "no"}}, "prompt", None),
    ("/v1/completions", {"prompt": [99999]}, "prompt", None),
    ("/v1/completions", {"prompt": "a", "max_tokenz": 3}, "max_tokenz", None),
    ("/v1/completions", {"prompt": "a", "temperature": -0.1}, "temperature", None),
    ("/v1/completions", {"prompt": "a", "seed": 2**64}, "seed", None),
    ("/v1/completions", {"prompt": "a", "n": 300}, "n", None),
    ("/v1/chat/completions", {"messages": []}, "messages", None),
    ("/v1/chat/completions", {"messages": "hello"}, "messages", None),
]


@pytest.mark.parametrize(("path", "body", "param", "code"), BAD)
def test_a_bad_request_gets_a_400_that_names_the_field_and_harms_nobody(
    stack: Cluster, path: str, body: dict[str, Any], param: str, code: str | None
) -> None:
    response = stack.post(path, {"model": "tiny"} | body)
    error = response.json()["error"]
    assert response.status_code == 400, response.text
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param, error
    if code is not None:
        assert error["code"] == code
        assert str(POOL_TOKENS) in error["message"], "the real limit of the pair"
    assert chat(stack, max_tokens=2).usage.completion_tokens >= 1


def test_errors_reach_the_openai_client_as_its_own_types(stack: Cluster) -> None:
    with pytest.raises(openai.NotFoundError) as not_found:
        chat(stack, model="another")
    assert not_found.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        chat(stack, max_tokens=0)
    assert bad.value.param in ("max_tokens", "max_completion_tokens")


def test_models_report_what_really_fits(stack: Cluster) -> None:
    listed = stack.client.models.list().data
    assert [model.id for model in listed] == ["tiny"]
    assert listed[0].model_dump()["max_model_len"] == POOL_TOKENS


def test_more_requests_than_the_pool_holds_all_end_well(stack: Cluster) -> None:
    def one(i: int) -> Any:
        return chat(stack, messages=[{"role": "user", "content": f"story number {i} " * 5}], max_tokens=40)

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(one, range(24)))
    assert all(answer.choices[0].finish_reason in ("stop", "length") for answer in answers)


def test_a_client_that_leaves_frees_everything(stack: Cluster) -> None:
    body = {
        "model": "tiny",
        "prompt": list(range(20, 100)),
        "max_tokens": 100,
        "stream": True,
        "ignore_eos": True,
    }
    for num_events in (0, 1, 5):
        with httpx.stream("POST", stack.gateway.url + "/v1/completions", json=body, timeout=30) as response:
            assert response.status_code == 200
            lines = response.iter_lines()
            for _ in range(num_events):
                next(lines)
        stack.assert_idle()


def test_the_lane_is_told_in_log_metric_and_debug(stack: Cluster) -> None:
    worker = stack.of_role("decode")[0]
    lane = worker.info().lane
    assert lane
    assert f'lane="{lane}"' in worker.get("/metrics").text
    assert worker.ledger()["lane"] == lane


def test_a_worker_takes_nothing_from_strangers(stack: Cluster) -> None:
    for worker in stack.workers:
        for path in ("/v1/worker", "/v1/generate", "/v1/prefill", "/debug/ledger"):
            for headers in ({}, {"authorization": "Bearer wrong"}):
                assert httpx.post(worker.url + path, headers=headers, content=b"x" * 100).status_code == 401
        assert httpx.get(worker.url + "/health").status_code == 200

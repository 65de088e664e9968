"""The OpenAI API of a real gateway over stub workers: the two ways to answer are one, and every shape is exact."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from services.protocol import Failure
from tests.support.stub_system import StubSystem, stub_system
from tests.support.stub_worker import Behaviour
from tests.support.text_model import make_text_model

CONTEXT = 512
TEXT = "naïve 漢字 👩‍💻 é says\nthe end"


@pytest.fixture(scope="module")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StubSystem]:
    model = make_text_model(tmp_path_factory.mktemp("model") / "m", context_tokens=CONTEXT)
    with stub_system(model, ["prefill", "decode"]) as system:
        yield system


@pytest.fixture(autouse=True)
def nothing_is_left(stubs: StubSystem) -> Iterator[None]:
    yield from stubs.one_test()


def says_in_bytes(stubs: StubSystem, text: str) -> list[int]:
    """One byte a token: every character beyond ASCII is split over tokens."""
    alphabet = {stubs.gateway.text.tokenizer.spelling(i): i for i in range(5, 400)}
    ids = [alphabet[bytes([byte])] for byte in text.encode()]
    for worker in stubs.workers:
        worker.output = [*ids, 2]
    return ids


def events(response: httpx.Response) -> list[Any]:
    """Parsed data lines; "[DONE]" as it is."""
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def chat(stubs: StubSystem, **fields: Any) -> httpx.Response:
    body = {"model": "stub", "messages": [{"role": "user", "content": "Hi"}]} | fields
    return stubs.post("/v1/chat/completions", body)


def texts(parsed: list[Any]) -> list[str]:
    choices = [event["choices"][0] for event in parsed if event != "[DONE]" and event["choices"]]
    return [choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices]


def test_characters_split_over_tokens_arrive_whole(stubs: StubSystem) -> None:
    says_in_bytes(stubs, TEXT)
    pieces = texts(events(stubs.complete(max_tokens=200, stream=True)))
    assert "".join(pieces) == TEXT
    assert all("\ufffd" not in piece for piece in pieces)
    assert stubs.complete(max_tokens=200).json()["choices"][0]["text"] == TEXT


@pytest.mark.parametrize("start", range(len(TEXT)))
def test_a_stop_string_anywhere_cuts_the_same_streaming_or_not(stubs: StubSystem, start: int) -> None:
    """Each one begins in a token of prefill's (the first) or decode's, and most straddle several."""
    says_in_bytes(stubs, TEXT)
    for length in (1, 2, 5):
        stop = TEXT[start : start + length]
        expected = TEXT[: TEXT.index(stop)]
        streamed = events(stubs.complete(max_tokens=200, stop=[stop, "never"], stream=True))
        whole = stubs.complete(max_tokens=200, stop=stop).json()["choices"][0]
        assert "".join(texts(streamed)) == whole["text"] == expected
        assert streamed[-2]["choices"][0]["finish_reason"] == whole["finish_reason"] == "stop"


def test_a_stop_string_ends_the_work_on_the_workers(stubs: StubSystem) -> None:
    says_in_bytes(stubs, "abc STOP" + "x" * 100)
    stubs.of_role("decode")[0].plan.append(Behaviour(hold_after=(20, stubs.gate())))
    answer = stubs.complete(max_tokens=200, stop="STOP").json()
    assert answer["choices"][0]["text"] == "abc "
    assert answer["usage"]["completion_tokens"] == len("abc STOP")
    stubs.wait(lambda: stubs.of_role("decode")[0].calls[0].ended == "cancelled", "decode is told to stop")


@pytest.mark.parametrize("path", ["chat", "completions"])
@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": True}])
def test_usage_is_streamed_exactly_if_asked_for(stubs: StubSystem, path: str, options: Any) -> None:
    ids = stubs.says("a b c")
    ask = chat if path == "chat" else StubSystem.complete
    parsed = events(ask(stubs, max_tokens=50, stream=True, stream_options=options))
    assert parsed[-1] == "[DONE]"
    assert parsed.count("[DONE]") == 1
    chunks = parsed[:-1]
    if options == {"include_usage": True}:
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"]["completion_tokens"] == len(ids) + 1
        assert all(chunk["usage"] is None for chunk in chunks[:-1])
        chunks = chunks[:-1]
    else:
        assert all("usage" not in chunk for chunk in chunks)
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["stop"]
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_the_role_comes_once_and_first(stubs: StubSystem) -> None:
    stubs.says("a b c")
    deltas = [event["choices"][0]["delta"] for event in events(chat(stubs, stream=True)) if event != "[DONE]"]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert not any("role" in delta for delta in deltas[1:])
    assert deltas[-1] == {}


def test_an_error_in_mid_stream_is_the_last_thing_said(stubs: StubSystem) -> None:
    stubs.says("one two three four")
    failure = Failure(message="that will never work", kind="invalid", param="temperature")
    stubs.of_role("decode")[0].plan.append(Behaviour(fail_after=(3, failure)))
    response = chat(stubs, stream=True, stream_options={"include_usage": True})
    parsed = events(response)
    assert response.status_code == 200
    assert parsed[-1] == {
        "error": {
            "message": "that will never work",
            "type": "invalid_request_error",
            "param": "temperature",
            "code": None,
        }
    }
    assert all(event["choices"][0]["finish_reason"] is None and event["usage"] is None for event in parsed[:-1])
    assert "".join(texts(parsed[:-1])) == stubs.tokenizer.decode(stubs.workers[0].output[:3])


def test_the_openai_client_sees_that_error(stubs: StubSystem) -> None:
    stubs.says("one two three four")
    failure = Failure(message="no", kind="invalid")
    stubs.of_role("decode")[0].plan.append(Behaviour(fail_after=(3, failure)))
    stream = stubs.client.chat.completions.create(
        model="stub", messages=[{"role": "user", "content": "Hi"}], stream=True
    )
    with pytest.raises(openai.APIError, match="no"):
        list(stream)


@pytest.mark.parametrize(("max_tokens", "reason"), [(1, "length"), (2, "length"), (50, "stop")])
def test_finish_reasons_and_counts(stubs: StubSystem, max_tokens: int, reason: str) -> None:
    ids = stubs.says("one two three")
    answer = chat(stubs, max_tokens=max_tokens).json()
    assert answer["choices"][0]["finish_reason"] == reason
    assert answer["usage"]["completion_tokens"] == min(max_tokens, len(ids) + 1)
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] + answer["usage"]["completion_tokens"]


def test_cached_tokens_are_those_of_the_worker_that_computed_the_prompt(stubs: StubSystem) -> None:
    stubs.says("one two three")
    stubs.of_role("prefill")[0].num_cached_tokens = 3
    stubs.of_role("decode")[0].num_cached_tokens = 9
    usage = [chat(stubs, max_tokens=n).json()["usage"]["prompt_tokens_details"] for n in (1, 5)]
    assert usage == [{"cached_tokens": 3}] * 2
    stubs.of_role("decode")[0].plan.append(Behaviour(accept=True))
    assert chat(stubs).json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 9}


def test_log_probabilities_have_an_entry_a_token_the_first_one_included(stubs: StubSystem) -> None:
    says_in_bytes(stubs, "aé b")
    whole = chat(stubs, max_tokens=4, logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"]["content"]
    assert [bytes(entry["bytes"]) for entry in whole] == [b"a", b"\xc3", b"\xa9", b" "]
    assert [len(entry["top_logprobs"]) for entry in whole] == [2] * 4
    assert whole[0]["token"] == "a"
    assert whole[0]["logprob"] == whole[0]["top_logprobs"][0]["logprob"]
    parsed = events(chat(stubs, max_tokens=4, logprobs=True, top_logprobs=2, stream=True))
    chunks = [event["choices"][0]["logprobs"] for event in parsed if event != "[DONE]"]
    assert [entry for chunk in chunks if chunk for entry in chunk["content"]] == whole


def test_log_probabilities_of_completions(stubs: StubSystem) -> None:
    says_in_bytes(stubs, "aé b")
    choice = stubs.complete(max_tokens=4, logprobs=2).json()["choices"][0]
    assert choice["logprobs"]["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9", " "]
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 2]
    assert [len(top) for top in choice["logprobs"]["top_logprobs"]] == [2] * 4
    assert stubs.complete(max_tokens=4).json()["choices"][0]["logprobs"] is None


def test_what_the_workers_are_told(stubs: StubSystem) -> None:
    stubs.says("a")
    fields: dict[str, Any] = {"temperature": 0.5, "seed": -7, "top_k": 5, "logit_bias": {"7": -3}, "ignore_eos": True}
    stubs.complete(prompt=[9, 8, 7], max_tokens=3, stop_token_ids=[2], **fields)
    prefill, decode = (stubs.of_role(role)[0].calls[0].request for role in ("prefill", "decode"))
    assert prefill.work == decode.work or prefill.work.deadline_s <= decode.work.deadline_s
    assert prefill.work.prompt_token_ids == [9, 8, 7]
    sampling = prefill.work.sampling
    assert sampling == decode.work.sampling
    assert (sampling.temperature, sampling.seed, sampling.top_k, sampling.logit_bias) == (0.5, -7, 5, {7: -3.0})
    assert (sampling.max_tokens, sampling.stop_token_ids) == (3, [2])


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/nothing", 404, None),
        ("GET", "/v1/chat/completions", 405, None),
        ("POST", "/v1/models", 405, None),
        ("GET", "/v1/models/other", 404, "model_not_found"),
        ("GET", "/v1/models/", 404, None),
        ("POST", "/v1/completions/", 404, None),
        ("GET", "/debug/cluster", 404, None),
        ("GET", "/docs", 404, None),
    ],
)
def test_every_error_has_openais_shape(
    stubs: StubSystem, method: str, path: str, status: int, code: str | None
) -> None:
    response = httpx.request(method, stubs.url + path)
    assert response.status_code == status
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    if code:
        assert error["code"] == code
    assert response.headers["x-request-id"]


def test_the_request_id_is_ours(stubs: StubSystem) -> None:
    stubs.says("a")
    headers = {"x-request-id": "chosen-by-the-client"}
    responses = [
        stubs.post("/v1/completions", {"model": "stub", "prompt": "a"} | extra, headers=headers)
        for extra in ({}, {"stream": True}, {"n": 500})
    ]
    ids = [response.headers["x-request-id"] for response in responses]
    assert len(set(ids)) == 3
    assert "chosen-by-the-client" not in ids
    assert stubs.record(responses[0])["client_request_id"] == "chosen-by-the-client"
    assert stubs.record(responses[1])["outcome"] == "success"


def test_an_unknown_model_is_not_found(stubs: StubSystem) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        stubs.client.completions.create(model="other", prompt="a")
    assert (refused.value.code, refused.value.param) == ("model_not_found", "model")


def test_models_say_what_fits(stubs: StubSystem) -> None:
    (model,) = stubs.client.models.list().data
    assert (model.id, model.model_dump()["max_model_len"]) == ("stub", CONTEXT)
    assert stubs.client.models.retrieve("stub").id == "stub"


@pytest.mark.parametrize("prompt", ["", [""], [], [[]]])
def test_an_empty_prompt_is_refused_and_harms_nobody(stubs: StubSystem, prompt: Any) -> None:
    stubs.says("a")
    response = stubs.complete(prompt=prompt)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")
    assert stubs.complete().status_code == 200


def test_the_timeline_shows_the_whole_passage(stubs: StubSystem) -> None:
    stubs.says("one two three")
    record = stubs.record(chat(stubs, stream=True))
    assert record["prefill"]["worker"] == stubs.servers[0].url
    assert record["decode"]["worker"] == stubs.servers[1].url
    assert record["transfer"]["lane"] == "stub"
    assert record["outcome"] == "success"
    assert [attempt["outcome"] for attempt in record["attempts"]] == ["stop"]
    for name in ("tokenize_s", "queue_s", "reserve_s"):
        assert record["gateway"][name] >= 0
    listed = httpx.get(stubs.admin_url + "/debug/requests").json()
    assert record["request_id"] in json.dumps(listed)


def test_metrics_count_each_outcome_once(stubs: StubSystem) -> None:
    stubs.says("one two three")
    labels = {"endpoint": "chat.completions"}
    good, bad = (stubs.metric("requests_total", **labels, outcome=outcome) for outcome in ("success", "400"))
    tokens = stubs.metric("output_tokens_total")
    answer = chat(stubs).json()
    chat(stubs, n=700)
    stubs.wait(lambda: stubs.metric("requests_total", **labels, outcome="400") == bad + 1, "the refusal is counted")
    assert stubs.metric("requests_total", **labels, outcome="success") == good + 1
    assert stubs.metric("output_tokens_total") == tokens + answer["usage"]["completion_tokens"]
    for url in (stubs.url, stubs.admin_url):
        assert "kvbaton_gateway_time_to_first_token_seconds_bucket" in httpx.get(url + "/metrics").text

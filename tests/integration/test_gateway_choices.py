"""Several choices in one answer: n, batches of prompts, echo, token ids; every index and count exact."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from services.protocol import Failure
from tests.support.stub_system import StubSystem, stub_system
from tests.support.stub_worker import Behaviour
from tests.support.text_model import make_text_model


@pytest.fixture(scope="module")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StubSystem]:
    model = make_text_model(tmp_path_factory.mktemp("model") / "m")
    with stub_system(model, ["prefill", "decode"]) as system:
        yield system


@pytest.fixture(autouse=True)
def nothing_is_left(stubs: StubSystem) -> Iterator[None]:
    yield from stubs.one_test()


def three_endings(stubs: StubSystem) -> list[str]:
    """Choices that end at once, after a while, and by length at four tokens."""
    spelled = ["", "a b", "one two three four five six"]
    ids = [stubs.tokenizer.encode(text, add_special_tokens=False).ids for text in spelled]
    ids[1] = ids[1][:2]
    for worker in stubs.workers:
        worker.output_of_choice = {i: [*one, 2] for i, one in enumerate(ids)}
    return ["", stubs.tokenizer.decode(ids[1]), stubs.tokenizer.decode(ids[2][:4])]


def chunks(response: Any) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines.count("[DONE]") == 1
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def chat(stubs: StubSystem, **fields: Any) -> Any:
    return stubs.post(
        "/v1/chat/completions", {"model": "stub", "messages": [{"role": "user", "content": "Hi"}]} | fields
    )


def test_every_choice_begins_and_ends_once_under_its_own_index(stubs: StubSystem) -> None:
    texts = three_endings(stubs)
    options = {"include_usage": True}
    events = chunks(chat(stubs, n=3, max_tokens=4, stream=True, stream_options=options))
    usage = events.pop()
    for index, (text, reason) in enumerate(zip(texts, ["stop", "stop", "length"], strict=True)):
        mine = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert not any("role" in choice["delta"] for choice in mine[1:])
        assert "".join(choice["delta"].get("content", "") for choice in mine) == text
        assert [choice["finish_reason"] for choice in mine] == [None] * (len(mine) - 1) + [reason]
    assert usage["choices"] == []
    whole = chat(stubs, n=3, max_tokens=4).json()
    assert [choice["message"]["content"] for choice in whole["choices"]] == texts
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    assert usage["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == 1 + 3 + 4
    assert (
        usage["usage"]["prompt_tokens"]
        == whole["usage"]["prompt_tokens"]
        == chat(stubs).json()["usage"]["prompt_tokens"]
    )


def test_choices_draw_differently_and_the_others_wait_for_the_leaders_prompt(stubs: StubSystem) -> None:
    stubs.says("one two three four")
    gate = stubs.gate()
    decode = stubs.of_role("decode")[0]
    decode.plan.append(Behaviour(hold_after=(2, gate)))
    held: list[int] = []

    def count() -> None:
        stubs.wait(lambda: len(decode.calls) == 3, "the others start")
        held.append(1)
        gate.open()

    import threading

    counter = threading.Thread(target=count)
    counter.start()
    answer = stubs.complete(n=3, max_tokens=5, seed=7).json()
    counter.join()
    assert held == [1]
    works = [call.request.work for call in decode.calls]
    assert sorted((work.sampling.choice, work.sampling.seed) for work in works) == [(0, 7), (1, 7), (2, 7)]
    assert len({work.request_id for work in works}) == 3
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]


def test_a_batch_of_prompts_is_answered_in_order(stubs: StubSystem) -> None:
    stubs.says("fine")
    decode = stubs.of_role("decode")[0]
    answer = stubs.complete(prompt=["a", [9, 8, 7], "b c"], n=2, max_tokens=4).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert {choice["text"] for choice in answer["choices"]} == {"fine"}
    prompts = [(call.request.work.prompt_token_ids, call.request.work.sampling.choice) for call in decode.calls]
    ids = [stubs.tokenizer.encode(text, add_special_tokens=False).ids for text in ("a", "b c")]
    for prompt in (ids[0], [9, 8, 7], ids[1]):
        assert sorted(choice for one, choice in prompts if one == prompt) == [0, 1]
    assert answer["usage"]["prompt_tokens"] == len(ids[0]) + 3 + len(ids[1])


def test_cached_tokens_count_each_prompt_once(stubs: StubSystem) -> None:
    stubs.says("fine")
    stubs.of_role("prefill")[0].num_cached_tokens = 2
    answer = stubs.complete(prompt=[[9, 8, 7], [9, 8, 7, 6]], n=2, max_tokens=4).json()
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}


def test_one_choice_that_fails_ends_the_whole_answer(stubs: StubSystem) -> None:
    stubs.says("one two three")
    failure = Failure(message="never", kind="invalid", param="seed")
    stubs.of_role("decode")[0].plan.extend([Behaviour(), Behaviour(fail_after=(1, failure))])
    refused = stubs.complete(n=3, max_tokens=8)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "seed")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 129}, "n"),
        ({"prompt": ["a"] * 1000}, "prompt"),
        ({"prompt": ["a"] * 65, "n": 2}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"n": 2, "best_of": 1}, "best_of"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"prompt": ["a", ""]}, "prompt"),
    ],
)
def test_more_than_is_served_is_refused(stubs: StubSystem, fields: dict[str, Any], param: str) -> None:
    refused = stubs.complete(**fields)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    assert not stubs.of_role("decode")[0].calls


def test_best_of_the_same_as_n_is_n(stubs: StubSystem) -> None:
    stubs.says("fine")
    assert len(stubs.complete(n=2, best_of=2, max_tokens=3).json()["choices"]) == 2


def test_echo_puts_the_prompt_before_the_text(stubs: StubSystem) -> None:
    stubs.says(" of France")
    for prompt, echoed in (("The capital", "The capital"), (stubs.tokenizer.encode("The é").ids, "The é")):
        whole = stubs.complete(prompt=prompt, echo=True, max_tokens=20).json()["choices"][0]
        assert whole["text"] == echoed + " of France"
        streamed = chunks(stubs.complete(prompt=prompt, echo=True, max_tokens=20, stream=True))
        assert "".join(chunk["choices"][0]["text"] for chunk in streamed) == whole["text"]


def test_echo_without_output_is_the_prompt_alone(stubs: StubSystem) -> None:
    stubs.says(" of France")
    for stream in (False, True):
        response = stubs.complete(
            echo=True, max_tokens=0, stream=stream, stream_options={"include_usage": True} if stream else None
        )
        body = response.json() if not stream else None
        parts = [body] if body else chunks(response)
        choices = [choice for part in parts for choice in part["choices"]]
        assert "".join(choice["text"] for choice in choices) == "The capital"
        assert choices[-1]["finish_reason"] == "length"
        assert parts[-1]["usage"]["completion_tokens"] == 0
    assert stubs.complete(echo=True, max_tokens=1).json()["usage"]["completion_tokens"] == 1


def logprobs_of(parts: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Joined over the chunks of one choice."""
    found: dict[str, list[Any]] = {}
    for part in parts:
        for name, values in (part["choices"][0]["logprobs"] or {}).items():
            found.setdefault(name, []).extend(values)
    return found


@pytest.mark.parametrize("max_tokens", [0, 1, 20])
def test_an_echoed_prompt_is_scored_streaming_or_not(stubs: StubSystem, max_tokens: int) -> None:
    output = stubs.says(" of France")
    prompt = stubs.tokenizer.encode("The capital é", add_special_tokens=False).ids
    num_output = min(max_tokens, len(output) + 1)
    for given in ("The capital é", prompt):
        fields: dict[str, Any] = {"prompt": given, "echo": True, "logprobs": 2, "max_tokens": max_tokens}
        whole = stubs.complete(**fields).json()
        choice = whole["choices"][0]
        assert choice["text"].startswith("The capital é")
        listed = choice["logprobs"]
        expected = [*prompt[1:], *[*output, 2][:num_output]]
        assert listed["token_logprobs"] == [None, *[-i / 100 for i in expected]]
        assert listed["top_logprobs"][0] is None
        assert [len(top) for top in listed["top_logprobs"][1:]] == [2] * len(expected)
        spelled = "".join(token for token in listed["tokens"] if not token.startswith("bytes:"))
        assert spelled.startswith("The capital ")
        assert listed["text_offset"][: len(prompt)] == sorted(listed["text_offset"][: len(prompt)])
        assert whole["usage"]["completion_tokens"] == num_output
        streamed = chunks(stubs.complete(**fields, stream=True))
        assert logprobs_of(streamed) == listed
        assert "".join(part["choices"][0]["text"] for part in streamed) == choice["text"]


def test_an_echo_waits_for_the_scores_of_its_prompt(stubs: StubSystem) -> None:
    """Decode may be heard before prefill is."""
    output = stubs.says(" of France")
    gate = stubs.gate()
    prefill, decode = (stubs.of_role(role)[0] for role in ("prefill", "decode"))
    prefill.plan.append(Behaviour(pause_scores=gate))
    stubs.thread.loop.call_soon_threadsafe(stubs.thread.loop.call_later, 0.05, gate.open)
    answer = stubs.complete(echo=True, logprobs=0, max_tokens=20).json()
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == answer["usage"]["total_tokens"]
    assert answer["usage"]["completion_tokens"] == len(output) + 1
    assert decode.calls


def test_an_attempt_after_a_failed_one_scores_nothing_twice(stubs: StubSystem) -> None:
    output = stubs.says(" of France and more")
    stubs.of_role("decode")[0].plan.append(Behaviour(cut_after=2))
    answer = stubs.complete(echo=True, logprobs=0, max_tokens=20).json()
    prompt = stubs.tokenizer.encode("The capital", add_special_tokens=False).ids
    listed = answer["choices"][0]["logprobs"]["token_logprobs"]
    assert listed == [None, *[-i / 100 for i in [*prompt[1:], *output, 2]]]


def test_token_ids_are_returned_on_request(stubs: StubSystem) -> None:
    ids = stubs.says("one two")
    prompt = stubs.tokenizer.encode("The capital", add_special_tokens=False).ids
    whole = stubs.complete(max_tokens=20, return_token_ids=True).json()["choices"][0]
    assert (whole["prompt_token_ids"], whole["token_ids"]) == (prompt, [*ids, 2])
    streamed = chunks(stubs.complete(max_tokens=20, return_token_ids=True, stream=True))
    assert [i for chunk in streamed for i in chunk["choices"][0].get("token_ids", [])] == [*ids, 2]
    assert streamed[0]["choices"][0]["prompt_token_ids"] == prompt
    answer = chat(stubs, max_tokens=20, return_token_ids=True).json()
    assert answer["choices"][0]["token_ids"] == [*ids, 2]
    assert len(answer["prompt_token_ids"]) == answer["usage"]["prompt_tokens"]
    events = chunks(chat(stubs, max_tokens=20, return_token_ids=True, stream=True))
    assert events[0]["prompt_token_ids"] == answer["prompt_token_ids"]
    assert [i for chunk in events for i in chunk["choices"][0].get("token_ids", [])] == [*ids, 2]


def test_tokens_can_be_named_by_their_ids(stubs: StubSystem) -> None:
    ids = stubs.says("one two")
    choice = stubs.complete(max_tokens=20, logprobs=0, return_tokens_as_token_ids=True).json()["choices"][0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in [*ids, 2]]


def test_the_stop_that_ended_a_text_is_named_and_may_be_kept(stubs: StubSystem) -> None:
    ids = stubs.says("one two three")
    cut = stubs.complete(max_tokens=20, stop=["three", "two"]).json()["choices"][0]
    assert (cut["text"], cut["stop_reason"], cut["finish_reason"]) == ("one ", "two", "stop")
    kept = stubs.complete(max_tokens=20, stop="two", include_stop_str_in_output=True).json()["choices"][0]
    assert kept["text"] == "one two"
    by_token = stubs.complete(max_tokens=20, stop_token_ids=[ids[1]]).json()["choices"][0]
    assert (by_token["stop_reason"], by_token["finish_reason"]) == (ids[1], "stop")
    assert stubs.complete(max_tokens=20).json()["choices"][0]["stop_reason"] is None


def test_special_tokens_are_spelled_out_on_request(stubs: StubSystem) -> None:
    for worker in stubs.workers:
        worker.output = [*stubs.tokenizer.encode("a").ids, 3, *stubs.tokenizer.encode("b").ids, 2]
    assert stubs.complete(max_tokens=20).json()["choices"][0]["text"] == "ab"
    spelled = stubs.complete(max_tokens=20, skip_special_tokens=False).json()["choices"][0]["text"]
    assert spelled == "a<|im_start|>b"


def test_a_prompt_is_truncated_from_the_left_on_request(stubs: StubSystem) -> None:
    stubs.says("fine")
    decode = stubs.of_role("decode")[0]
    stubs.complete(prompt=list(range(10, 20)), truncate_prompt_tokens=3, max_tokens=3)
    stubs.complete(prompt="word " * 2000, truncate_prompt_tokens=4, max_tokens=3)
    assert decode.calls[0].request.work.prompt_token_ids == [17, 18, 19]
    assert len(decode.calls[1].request.work.prompt_token_ids) == 4


def test_a_salt_keeps_cached_kv_apart(stubs: StubSystem) -> None:
    stubs.says("fine")
    for salt in ("mine", "yours", None):
        stubs.complete(cache_salt=salt, max_tokens=3)
    domains = [call.request.work.cache_domain for call in stubs.of_role("prefill")[0].calls]
    assert len(set(domains)) == 3
    assert domains[-1] == b""


def test_an_answer_names_what_computed_it(stubs: StubSystem) -> None:
    stubs.says("fine")
    prints = {
        chat(stubs).json()["system_fingerprint"],
        stubs.complete().json()["system_fingerprint"],
        chunks(chat(stubs, stream=True))[0]["system_fingerprint"],
    }
    assert len(prints) == 1
    assert prints.pop().startswith("fp_")


def test_the_record_of_a_request_tells_its_choices_apart(stubs: StubSystem) -> None:
    three_endings(stubs)
    record = stubs.record(chat(stubs, n=3, max_tokens=4))
    assert [choice["finish_reason"] for choice in record["choices"]] == ["stop", "stop", "length"]
    assert [choice["num_output_tokens"] for choice in record["choices"]] == [1, 3, 4]
    assert record["num_output_tokens"] == 8
    assert len(record["attempts"]) == 3

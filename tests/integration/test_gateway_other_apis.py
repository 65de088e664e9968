"""The Responses and Messages APIs as their own clients see them, and the small endpoints."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from services.protocol import Failure
from tests.integration.test_gateway_tools import TEMPLATE, TOOLS, TWO_CALLS
from tests.support.stub_system import StubSystem, stub_system
from tests.support.stub_worker import Behaviour
from tests.support.text_model import make_text_model

FLAT_TOOLS: list[Any] = [{"type": "function", **tool["function"]} for tool in TOOLS]
CLAUDE_TOOLS: list[Any] = [
    {"name": tool["function"]["name"], "input_schema": {"type": "object", "properties": {}}} for tool in TOOLS
]


@pytest.fixture(scope="module")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StubSystem]:
    model = make_text_model(tmp_path_factory.mktemp("model") / "m", template=TEMPLATE, context_tokens=2000)
    with stub_system(model, ["prefill", "decode"]) as system:
        yield system


@pytest.fixture(autouse=True)
def nothing_is_left(stubs: StubSystem) -> Iterator[None]:
    yield from stubs.one_test()


@pytest.fixture(scope="module")
def claude(stubs: StubSystem) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=stubs.url, api_key="none", max_retries=0, timeout=20) as client:
        yield client


def last_prompt(stubs: StubSystem) -> str:
    return stubs.tokenizer.decode(
        stubs.of_role("decode")[0].calls[-1].request.work.prompt_token_ids, skip_special_tokens=False
    )


def without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: without_ids(v) for k, v in value.items() if k not in ("id", "call_id", "created_at", "item_id")}
    return [without_ids(item) for item in value] if isinstance(value, list) else value


def test_a_response_streamed_ends_in_the_whole_one(stubs: StubSystem) -> None:
    for text in ("Grüße aus Köln", TWO_CALLS):
        stubs.says(text)
        fields: dict[str, Any] = {"model": "stub", "input": "Hi", "tools": FLAT_TOOLS, "instructions": "Be brief."}
        whole = stubs.client.responses.create(**fields)
        events = list(stubs.client.responses.create(**fields, stream=True))
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert events[0].type == "response.created"
        assert events[-1].type == "response.completed"
        assert without_ids(events[-1].response.model_dump()) == without_ids(whole.model_dump())
        added = [event.item.id for event in events if event.type == "response.output_item.added"]
        done = [event.item for event in events if event.type == "response.output_item.done"]
        assert added == [item.id for item in done] == [item.id for item in events[-1].response.output]
        deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        assert deltas == whole.output_text
    assert [item.type for item in whole.output] == ["reasoning", "function_call", "function_call"]
    assert whole.usage.output_tokens_details.reasoning_tokens > 0
    assert json.loads(whole.output[1].arguments) == {"city": "Köln"}


def test_the_openai_clients_own_accumulator_takes_a_response(stubs: StubSystem) -> None:
    stubs.says(TWO_CALLS)
    with stubs.client.responses.stream(model="stub", input="Hi", tools=FLAT_TOOLS) as stream:
        final = stream.get_final_response()
    assert [item.name for item in final.output if item.type == "function_call"] == ["weather", "time"]


def test_a_response_cut_by_length_is_incomplete(stubs: StubSystem) -> None:
    stubs.says("one two three four five six")
    answer = stubs.client.responses.create(model="stub", input="Hi", max_output_tokens=2)
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage.output_tokens == 2


def test_items_of_a_response_go_back_in(stubs: StubSystem) -> None:
    stubs.says(TWO_CALLS)
    items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}]
    first = stubs.client.responses.create(model="stub", input=items, tools=FLAT_TOOLS)
    items += [item.model_dump(exclude_none=True) for item in first.output]
    calls = [item for item in first.output if item.type == "function_call"]
    items += [{"type": "function_call_output", "call_id": call.call_id, "output": "rain"} for call in calls]
    stubs.says("It rains.")
    second = stubs.client.responses.create(model="stub", input=items, tools=FLAT_TOOLS)
    assert second.output_text == "It rains."
    prompt = last_prompt(stubs)
    assert '<tool_call>{"name": "weather", "arguments": {"city": "Köln"}}</tool_call>' in prompt
    assert prompt.count("<|im_start|>tool\nrain") == 2
    assert prompt.count("<|im_start|>assistant") == 2, "one turn of the assistant's, and the one to come"


def test_log_probabilities_of_a_response(stubs: StubSystem) -> None:
    stubs.says("one two")
    include: Any = ["message.output_text.logprobs"]
    answer = stubs.client.responses.create(model="stub", input="Hi", include=include, top_logprobs=2)
    logprobs = answer.output[0].content[0].logprobs
    assert "".join(entry.token for entry in logprobs) == "one two</s>"
    assert [len(entry.top_logprobs) for entry in logprobs] == [2] * len(logprobs)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"truncation": "auto"}, "truncation"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "wizard", "content": "a"}]}, "input[0].role"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].arguments"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"temperature": 3}, "temperature"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_what_a_response_cannot_be_is_refused_by_name(stubs: StubSystem, fields: dict[str, Any], param: str) -> None:
    refused = stubs.post("/v1/responses", {"model": "stub", "input": "Hi"} | fields)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


def test_a_response_that_fails_says_so_in_an_event(stubs: StubSystem) -> None:
    stubs.says("one two three four")
    stubs.of_role("decode")[0].plan.append(Behaviour(fail_after=(3, Failure(message="no", kind="invalid"))))
    events = list(stubs.client.responses.create(model="stub", input="Hi", stream=True))
    assert events[-1].type == "error"
    assert events[-1].message == "no"
    assert not any(event.type.startswith("response.completed") for event in events)


def test_a_message_streamed_equals_the_whole_one(stubs: StubSystem, claude: anthropic.Anthropic) -> None:
    for text, stop_reason in (("Grüße aus Köln", "end_turn"), (TWO_CALLS, "tool_use")):
        stubs.says(text)
        fields: dict[str, Any] = {
            "model": "stub",
            "max_tokens": 200,
            "system": "Be brief.",
            "messages": [{"role": "user", "content": "Hi"}],
            "tools": CLAUDE_TOOLS,
        }
        whole = claude.messages.create(**fields)
        assert whole.stop_reason == stop_reason
        with claude.messages.stream(**fields) as stream:
            final = stream.get_final_message()
        assert without_ids(final.model_dump()) == without_ids(whole.model_dump())
        raw = [event.type for event in claude.messages.create(**fields, stream=True)]
        assert (raw[0], raw[-2:]) == ("message_start", ["message_delta", "message_stop"])
        assert raw.count("content_block_start") == raw.count("content_block_stop") == len(whole.content)
    assert [block.type for block in whole.content] == ["thinking", "tool_use", "tool_use"]
    assert whole.content[1].input == {"city": "Köln"}


def test_why_a_message_ended(stubs: StubSystem, claude: anthropic.Anthropic) -> None:
    stubs.says("one two three")
    fields: dict[str, Any] = {"model": "stub", "messages": [{"role": "user", "content": "Hi"}]}
    cut = claude.messages.create(**fields, max_tokens=50, stop_sequences=["two"])
    assert (cut.stop_reason, cut.stop_sequence, cut.content[0].text) == ("stop_sequence", "two", "one ")
    assert claude.messages.create(**fields, max_tokens=1).stop_reason == "max_tokens"


def test_cached_tokens_of_a_message_are_counted_apart(stubs: StubSystem, claude: anthropic.Anthropic) -> None:
    stubs.says("one")
    stubs.of_role("prefill")[0].num_cached_tokens = 3
    usage = claude.messages.create(model="stub", max_tokens=9, messages=[{"role": "user", "content": "Hi"}]).usage
    count = claude.messages.count_tokens(model="stub", messages=[{"role": "user", "content": "Hi"}])
    assert usage.cache_read_input_tokens == 3
    assert usage.input_tokens + 3 == count.input_tokens


def test_blocks_of_a_message_go_back_in(stubs: StubSystem, claude: anthropic.Anthropic) -> None:
    stubs.says(TWO_CALLS)
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    first = claude.messages.create(model="stub", max_tokens=200, messages=messages, tools=CLAUDE_TOOLS)
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "rain"}]}
        for block in first.content
        if block.type == "tool_use"
    ]
    messages += [{"role": "assistant", "content": [block.model_dump() for block in first.content]}]
    messages += [{"role": "user", "content": [*results, {"type": "text", "text": "And now?"}]}]
    stubs.says("It rains.")
    second = claude.messages.create(model="stub", max_tokens=200, messages=messages, tools=CLAUDE_TOOLS)
    assert second.content[0].text == "It rains."
    prompt = last_prompt(stubs)
    assert '<tool_call>{"name": "weather", "arguments": {"city": "Köln"}}</tool_call>' in prompt
    assert prompt.count("<|im_start|>tool\nrain") == 2
    assert prompt.index("And now?") > prompt.index("rain")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system", "content": "a"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "messages[0].content[0].type"),
        ({"tools": [{"type": "web_search_20250305", "name": "web"}]}, "tools[0]"),
        ({"tool_choice": {"type": "maybe"}}, "tool_choice"),
        ({"temperature": 1.5}, "temperature"),
        ({"thinking": {"type": "sometimes"}}, "thinking"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_what_a_message_cannot_be_is_refused_by_name(stubs: StubSystem, fields: dict[str, Any], named: str) -> None:
    body = {"model": "stub", "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]} | fields
    refused = stubs.post("/v1/messages", body)
    error = refused.json()
    assert (refused.status_code, error["type"], error["error"]["type"]) == (400, "error", "invalid_request_error")
    assert named in error["error"]["message"]


def test_errors_of_messages_are_their_clients_own(stubs: StubSystem, claude: anthropic.Anthropic) -> None:
    messages: list[Any] = [{"role": "user", "content": "Hi"}]
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(model="other", max_tokens=5, messages=messages)
    stubs.says("one two three four")
    stubs.of_role("decode")[0].plan.append(Behaviour(fail_after=(3, Failure(message="no", kind="invalid"))))
    with pytest.raises(anthropic.APIStatusError, match="no"):
        list(claude.messages.create(model="stub", max_tokens=50, messages=messages, stream=True))


def test_tokens_of_a_text_and_of_a_chat_and_back(stubs: StubSystem) -> None:
    text = "naïve 漢字 <|im_start|>"
    answer = stubs.post("/tokenize", {"model": "stub", "prompt": text, "return_token_strs": True}).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 2000
    assert stubs.post("/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": text}
    assert stubs.post("/detokenize", {"tokens": []}).json() == {"prompt": ""}
    messages = [{"role": "user", "content": "Hi"}]
    stubs.says("one")
    chat = stubs.post("/tokenize", {"messages": messages, "tools": TOOLS}).json()
    stubs.post("/v1/chat/completions", {"model": "stub", "messages": messages, "tools": TOOLS})
    assert chat["tokens"] == stubs.of_role("decode")[0].calls[0].request.work.prompt_token_ids


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "a", "colour": 1}, "colour"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [2**40]}, "tokens"),
        ("/detokenize", {"tokens": [[1], [2]]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens"),
    ],
)
def test_what_cannot_be_tokenised_is_refused(stubs: StubSystem, path: str, body: dict[str, Any], param: str) -> None:
    refused = stubs.post(path, body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


def test_another_model_has_no_tokens_here(stubs: StubSystem) -> None:
    assert stubs.post("/tokenize", {"model": "other", "prompt": "a"}).status_code == 404


def test_version_and_load(stubs: StubSystem) -> None:
    assert httpx.get(stubs.url + "/version").json()["version"]
    assert httpx.get(stubs.url + "/load").json() == {"server_load": 0, "queued": 0}


def test_embeddings_are_refused_clearly(stubs: StubSystem) -> None:
    with pytest.raises(openai.BadRequestError, match="embeddings are not served"):
        stubs.client.embeddings.create(model="stub", input="a")

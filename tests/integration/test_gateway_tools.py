"""Tool calls and reasoning of a whole gateway, as the openai client parses them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.support.stub_system import StubSystem, stub_system
from tests.support.text_model import make_text_model

TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    'Answer with <tool_call>{"name": ..., "arguments": ...}</tool_call>{% endif %}'
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}<|im_start|>assistant\n{# a thought ends with </think> #}"
)
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}},
    {"type": "function", "function": {"name": "time"}},
]
TWO_CALLS = (
    '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "time", "arguments": {"zone": [1]}}\n</tool_call>'
)


@pytest.fixture(scope="module")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StubSystem]:
    model = make_text_model(tmp_path_factory.mktemp("model") / "m", template=TEMPLATE, context_tokens=2000)
    with stub_system(model, ["prefill", "decode"]) as system:
        yield system


@pytest.fixture(autouse=True)
def nothing_is_left(stubs: StubSystem) -> Iterator[None]:
    yield from stubs.one_test()


def ask(stubs: StubSystem, **fields: Any) -> Any:
    defaults: dict[str, Any] = {"model": "stub", "messages": [{"role": "user", "content": "Hi"}], "tools": TOOLS}
    return stubs.client.chat.completions.create(**defaults | fields)


def test_calls_streamed_equal_those_of_a_whole_answer(stubs: StubSystem) -> None:
    stubs.says(TWO_CALLS)
    whole = ask(stubs).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert whole.message.content is None
    assert whole.message.reasoning_content == "hm"
    calls = whole.message.tool_calls
    assert [(c.function.name, json.loads(c.function.arguments)) for c in calls] == [
        ("weather", {"city": "Köln"}),
        ("time", {"zone": [1]}),
    ]
    names: dict[int, str] = {}
    arguments = {0: "", 1: ""}
    reasons, reasoning = [], ""
    for chunk in ask(stubs, stream=True):
        choice = chunk.choices[0]
        reasons.append(choice.finish_reason)
        reasoning += getattr(choice.delta, "reasoning_content", None) or ""
        for call in choice.delta.tool_calls or []:
            written = call.model_dump(exclude_unset=True)
            if call.index in names:
                assert set(written) == {"index", "function"}
                assert set(written["function"]) == {"arguments"}
            else:
                assert call.id
                assert call.type == "function"
                names[call.index] = call.function.name
            arguments[call.index] += call.function.arguments
    assert names == {0: "weather", 1: "time"}
    assert [arguments[0], arguments[1]] == [call.function.arguments for call in calls]
    assert reasons[-1] == "tool_calls"
    assert reasoning == "hm"


def test_the_openai_clients_own_accumulator_agrees(stubs: StubSystem) -> None:
    stubs.says(TWO_CALLS)
    with stubs.client.chat.completions.stream(
        model="stub", messages=[{"role": "user", "content": "Hi"}], tools=TOOLS
    ) as stream:
        final = stream.get_final_completion()
    calls = final.choices[0].message.tool_calls or []
    assert [json.loads(call.function.arguments) for call in calls] == [{"city": "Köln"}, {"zone": [1]}]


def test_one_call_only_when_calls_in_parallel_are_not_wanted(stubs: StubSystem) -> None:
    stubs.says(TWO_CALLS)
    choice = ask(stubs, parallel_tool_calls=False).choices[0]
    assert [call.function.name for call in choice.message.tool_calls] == ["weather"]
    assert choice.finish_reason == "tool_calls"


def test_a_call_that_is_cut_off_ends_by_length(stubs: StubSystem) -> None:
    num_tokens = len(stubs.says(TWO_CALLS))
    choice = ask(stubs, max_tokens=num_tokens // 3).choices[0]
    assert choice.finish_reason == "length"


def test_without_tools_a_call_is_text_and_the_model_is_shown_none(stubs: StubSystem) -> None:
    text = '<tool_call>{"name": "weather", "arguments": {}}</tool_call>'
    stubs.says(text)
    decode = stubs.of_role("decode")[0]
    assert ask(stubs, tools=openai.NOT_GIVEN).choices[0].message.content == text
    assert ask(stubs, tool_choice="none").choices[0].message.content == text
    assert ask(stubs).choices[0].message.tool_calls[0].function.name == "weather"
    prompts = [stubs.tokenizer.decode(call.request.work.prompt_token_ids) for call in decode.calls]
    assert ["weather" in prompt for prompt in prompts] == [False, False, True]


def test_a_conversation_goes_on_with_the_result_of_a_call(stubs: StubSystem) -> None:
    stubs.says(TWO_CALLS)
    message = ask(stubs).choices[0].message
    stubs.says("It rains.")
    results = [{"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in message.tool_calls]
    answer = ask(stubs, messages=[{"role": "user", "content": "Hi"}, message.model_dump(), *results])
    assert answer.choices[0].message.content == "It rains."
    prompt = stubs.tokenizer.decode(stubs.of_role("decode")[0].calls[-1].request.work.prompt_token_ids)
    assert '<tool_call>{"name": "weather", "arguments": {"city": "Köln"}}</tool_call>' in prompt
    assert prompt.count("rain") == 2


def test_a_model_that_knows_no_tools_refuses_them(tmp_path_factory: pytest.TempPathFactory) -> None:
    model = make_text_model(tmp_path_factory.mktemp("model") / "plain")
    with stub_system(model, ["decode"]) as plain, pytest.raises(openai.BadRequestError) as refused:
        ask(plain)
    assert refused.value.param == "tools"

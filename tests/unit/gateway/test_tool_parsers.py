"""Reasoning and tool calls out of text: the same however the text is cut, and never a character lost or invented."""

from __future__ import annotations

import itertools
import json
import random

import pytest

from services.gateway.output import Delta, Result
from services.gateway.plan import OutputParser
from services.gateway.tools.formats import OutputFormat
from services.gateway.tools.parsers import HermesParser, Llama3Parser
from services.gateway.tools.reasoning import ReasoningParser, opens_thought

CALL_A = '{"name": "weather", "arguments": {"city": "K\\u00f6ln \\"am\\" Rhein", "days": [1, {"a": 2}]}}'
CALL_B = '{"arguments": {}, "name": "time"}'


def ids() -> itertools.count[int]:
    return itertools.count()


def hermes(**options: bool) -> HermesParser:
    numbers = ids()
    return HermesParser(["weather", "time"], new_id=lambda: f"call_{next(numbers)}", **options)


def llama3(**options: bool) -> Llama3Parser:
    numbers = ids()
    return Llama3Parser(["weather", "time"], new_id=lambda: f"call_{next(numbers)}", **options)


def deltas(parser: OutputParser, pieces: list[str]) -> list[Delta]:
    out = []
    for piece in pieces:
        if parser.ended:
            break
        out.append(parser.push(piece))
    return [*out, parser.flush()]


def whole(parser: OutputParser, pieces: list[str]) -> Result:
    result = Result()
    for delta in deltas(parser, pieces):
        result.add(delta)
    return result


def cuts(text: str) -> list[list[str]]:
    """Every cut in two, one character at a time, and some at random."""
    ways = [[text], list(text), *([text[:i], text[i:]] for i in range(1, len(text)))]
    draw = random.Random(7)
    for _ in range(50):
        at = sorted(draw.sample(range(1, len(text)), min(4, len(text) - 1)))
        ways.append([text[a:b] for a, b in itertools.pairwise([0, *at, len(text)])])
    return ways


HERMES = f"Let me look.\n<tool_call>\n{CALL_A}\n</tool_call>\n<tool_call>{CALL_B}</tool_call>\n"


def test_hermes_calls_are_read_the_same_however_they_arrive() -> None:
    for pieces in cuts(HERMES):
        result = whole(hermes(), pieces)
        assert result.content == "Let me look.\n"
        assert [(call.id, call.name) for call in result.tool_calls] == [("call_0", "weather"), ("call_1", "time")]
        arguments = [json.loads(call.arguments) for call in result.tool_calls]
        assert arguments == [{"city": 'Köln "am" Rhein', "days": [1, {"a": 2}]}, {}]


def test_id_and_name_come_once_and_first() -> None:
    for pieces in cuts(HERMES):
        seen: set[int] = set()
        for delta in deltas(hermes(), pieces):
            for call in delta.tool_calls:
                assert (call.index not in seen) == (call.id is not None) == (call.name is not None)
                seen.add(call.index)
        assert seen == {0, 1}


def test_arguments_are_streamed_before_they_are_complete() -> None:
    parser = hermes()
    parts = [parser.push(piece) for piece in ('<tool_call>{"name": "weather", "arguments": {"ci', 'ty": "K', 'öln"}')]
    assert [[call.arguments for call in part.tool_calls] for part in parts] == [["", '{"ci'], ['ty": "K'], ['öln"}']]
    assert parser.num_tool_calls == 0, "a call that is cut off is no call to make"


@pytest.mark.parametrize(
    "text",
    [
        "no call at all",
        "a < b and <tool and <tool_call",
        "<tool_call>not json</tool_call> after",
        '<tool_call>{"arguments": {"a": 1}}</tool_call>',
        '<tool_call>{"name": 5}</tool_call>',
        '<tool_call>{"arguments": {"a": 1}, "na',
    ],
)
def test_what_is_no_call_is_text_to_the_last_character(text: str) -> None:
    for pieces in cuts(text):
        result = whole(hermes(), pieces)
        assert (result.content, result.tool_calls) == (text, []), pieces


def test_arguments_written_as_a_string_are_unwrapped() -> None:
    text = '<tool_call>{"name": "weather", "arguments": "{\\"city\\": 1}"}</tool_call>'
    for pieces in cuts(text):
        assert [call.arguments for call in whole(hermes(), pieces).tool_calls] == ['{"city": 1}']


def test_a_call_without_arguments_has_an_empty_object() -> None:
    for pieces in cuts('<tool_call>{"name": "time"}</tool_call>'):
        assert [call.arguments for call in whole(hermes(), pieces).tool_calls] == ["{}"]


def test_nothing_is_read_after_the_one_call_that_is_wanted() -> None:
    for pieces in cuts(HERMES):
        parser = hermes(one_only=True)
        assert [call.name for call in whole(parser, pieces).tool_calls] == ["weather"]
        assert parser.ended


def test_llama3_calls_are_read_the_same_however_they_arrive() -> None:
    text = ' <|python_tag|>{"name": "weather", "parameters": {"city": "x}"}}; {"name": "time", "parameters": {}}\n'
    for pieces in cuts(text):
        result = whole(llama3(), pieces)
        assert [(call.name, call.arguments) for call in result.tool_calls] == [
            ("weather", '{"city": "x}"}'),
            ("time", "{}"),
        ]
        assert result.content == ""


@pytest.mark.parametrize(
    "text",
    [
        "It rains.",
        '  {"name": "Bob", "parameters": {"age": 3}} is no tool',
        '{"city": "Bonn"}',
        "{not json}",
        'It is {"name": "weather", "parameters": {}}',
        "[1, 2]",
    ],
)
def test_llama3_text_stays_text(text: str) -> None:
    for pieces in cuts(text):
        result = whole(llama3(), pieces)
        assert (result.content, result.tool_calls) == (text, []), pieces


def test_reasoning_is_told_apart_from_the_answer() -> None:
    text = "\n<think>\nIf 2 < 3 </thin then\n\nyes.\n</think>\n\nYes.\n"
    for pieces in cuts(text):
        result = whole(ReasoningParser(), pieces)
        assert (result.reasoning, result.content) == ("If 2 < 3 </thin then\n\nyes.", "Yes.\n")


def test_a_thought_may_be_opened_by_the_prompt_or_never_closed() -> None:
    assert opens_thought("<|im_start|>assistant\n<think>\n")
    assert not opens_thought("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    for pieces in cuts("hm\n</think>\nYes."):
        result = whole(ReasoningParser(thinking=True), pieces)
        assert (result.reasoning, result.content) == ("hm", "Yes.")
    for pieces in cuts("<think>hm, </thi"):
        result = whole(ReasoningParser(), pieces)
        assert (result.reasoning, result.content) == ("hm, </thi", "")


@pytest.mark.parametrize("text", ["Yes.", "\n\nYes.", "<thin", "a <think> b </think>", " "])
def test_an_answer_without_a_thought_is_left_alone(text: str) -> None:
    for pieces in cuts(text):
        assert whole(ReasoningParser(), pieces).content == text


def test_a_call_may_follow_a_thought() -> None:
    for pieces in cuts(f"<think>hm</think>\n{HERMES}"):
        result = whole(ReasoningParser(hermes()), pieces)
        assert (result.reasoning, result.content) == ("hm", "Let me look.\n")
        assert [call.name for call in result.tool_calls] == ["weather", "time"]


def test_formats_are_told_by_the_template_unless_a_flag_says() -> None:
    assert OutputFormat.of("... <tool_call> ... </think>", "auto", "auto") == OutputFormat("hermes", "think")
    assert OutputFormat.of("... <|python_tag|> ...", "auto", "auto") == OutputFormat("llama3", "none")
    assert OutputFormat.of("plain", "auto", "auto") == OutputFormat("none", "none")
    assert OutputFormat.of("plain", "llama3", "think") == OutputFormat("llama3", "think")
    assert OutputFormat.of("<tool_call> </think>", "none", "none") == OutputFormat("none", "none")

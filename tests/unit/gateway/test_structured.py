"""What a request says about the form of its output: one constraint, every mistake named, and the grammar it becomes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.grammar import Grammars
from services.gateway.errors import InvalidRequest
from services.gateway.structured.constraints import Constraint, read_constraint
from services.gateway.structured.grammars import GrammarCheck, Thought, calls_grammar, constraint_grammar
from services.gateway.tools.definitions import Tool
from services.gateway.tools.formats import ToolFormat
from services.gateway.tools.parsers import HermesParser, Llama3Parser
from tests.support.text_model import make_text_model

EOS = 2


def wrapped(**schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "json"}, "response_format.type"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "text", "more": 1}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "response_format.json_schema.name",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "x": 1}}},
            "response_format.json_schema",
        ),
        ({"guided_json": 5}, "guided_json"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_regex": "a" * 10_000}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", 5]}, "guided_choice"),
        ({"guided_choice": ["a"] * 2000}, "guided_choice"),
        ({"guided_grammar": ["a"]}, "guided_grammar"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs.json_object"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
    ],
)
def test_a_mistake_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_constraint(**{"response_format": None, "structured_outputs": None} | fields)
    assert refused.value.param == param


def test_the_same_constraint_by_any_name() -> None:
    schema = {"type": "object", "properties": {}}
    for fields in (
        {"response_format": wrapped(**schema)},
        {"guided_json": schema},
        {"guided_json": json.dumps(schema)},
        {"structured_outputs": {"json": schema}},
    ):
        found = read_constraint(**{"response_format": None, "structured_outputs": None} | fields)
        assert found is not None
        assert (found.kind, found.value) == ("json", schema)
    assert read_constraint({"type": "text"}, None) is None
    assert read_constraint(None, {}, guided_regex=None) is None


def test_a_grammar_that_cannot_be_used_names_the_clients_field() -> None:
    check = GrammarCheck()
    for constraint in (
        Constraint("json", {"type": "strin"}, "response_format.json_schema.schema"),
        Constraint("json", {"properties": {"a": {"not": {}}}}, "guided_json"),
        Constraint("regex", "(", "guided_regex"),
        Constraint("grammar", "nonsense", "guided_grammar"),
    ):
        for _ in range(2):
            with pytest.raises(InvalidRequest) as refused:
                check(constraint_grammar(constraint), constraint.param)
            assert refused.value.param == constraint.param


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    directory = make_text_model(tmp_path_factory.mktemp("model") / "m")
    return Grammars(directory / "tokenizer.json", 400, [EOS])


@pytest.fixture(scope="module")
def alphabet(tmp_path_factory: pytest.TempPathFactory) -> dict[bytes, int]:
    from services.gateway.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(make_text_model(tmp_path_factory.mktemp("model") / "m"))
    return {tokenizer.spelling(i): i for i in range(5, 400)}


def fits(grammars: Grammars, alphabet: dict[bytes, int], grammar: str, text: str) -> bool:
    """Whether the grammar allows this text, and to end after it: one byte a token."""
    state = grammars.state(grammar)
    may_end = bool(state.allowed([alphabet[bytes([byte])] for byte in text.encode()])[EOS])
    return may_end and not state.problem


@pytest.mark.parametrize(
    ("constraint", "good", "bad"),
    [
        (Constraint("choice", ['"a"/b', "ä"], "p"), ['"a"/b', "ä"], ["", "a", '"a"/', "ää"]),
        (Constraint("regex", r"a/b\d{2}", "p"), ["a/b12"], ["a/b1", "a/b123", "ab12"]),
        (Constraint("grammar", 'start: "x"+ NUM\nNUM: /[0-9]/', "p"), ["xx1"], ["1", "xx", "xx12"]),
        (Constraint("json", {"type": "object"}, "p"), ['{"a": [1, {}]}', "{}"], ["[]", "{", '{"a": 1,}', "{}x"]),
        (
            Constraint("json", {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}, "p"),
            ['{"a":1}', '{\n    "a": 2\n}'],
            ['{"a": 3}', "{}", "{" + " " * 70 + '"a": 1}'],
        ),
    ],
)
def test_a_constraint_allows_what_it_says_and_nothing_else(
    grammars: Grammars, alphabet: dict[bytes, int], constraint: Constraint, good: list[str], bad: list[str]
) -> None:
    thought = "if <a> then\nb</think>\n\n"
    ways: dict[Thought, list[str]] = {"none": [""], "open": [thought], "possible": ["", "<think>" + thought]}
    for how, leads in ways.items():
        grammar = constraint_grammar(constraint, how)
        for lead in leads:
            assert [fits(grammars, alphabet, grammar, lead + text) for text in good] == [True] * len(good), (how, lead)
            assert [fits(grammars, alphabet, grammar, lead + text) for text in bad] == [False] * len(bad), (how, lead)


def tool(name: str, **parameters: Any) -> Tool:
    return Tool(name, {"type": "function", "function": {"name": name, "parameters": parameters}})


TOOLS = [
    tool(
        "weather",
        type="object",
        properties={"city": {"$ref": "#/$defs/city"}},
        required=["city"],
        additionalProperties=False,
        **{"$defs": {"city": {"type": "string"}}},
    ),
    tool("time"),
]
CALL = {"hermes": "<tool_call>\n%s\n</tool_call>", "llama3": "%s"}
KEY = {"hermes": "arguments", "llama3": "parameters"}
BETWEEN = {"hermes": "\n", "llama3": "; "}


@pytest.mark.parametrize("form", ["hermes", "llama3"])
def test_calls_that_must_be_made_are_those_that_are_read(
    grammars: Grammars, alphabet: dict[bytes, int], form: ToolFormat
) -> None:
    weather = CALL[form] % f'{{"name": "weather", "{KEY[form]}": {{"city": "Bonn"}}}}'
    time = CALL[form] % f'{{"name": "time", "{KEY[form]}": {{}}}}'
    other = CALL[form] % f'{{"name": "other", "{KEY[form]}": {{}}}}'
    wrong = CALL[form] % f'{{"name": "weather", "{KEY[form]}": {{"town": "Bonn"}}}}'
    many, one = (calls_grammar(TOOLS, form, one_only=only) for only in (False, True))
    both = weather + BETWEEN[form] + time
    for grammar in (many, one):
        assert [fits(grammars, alphabet, grammar, text) for text in (weather, time)] == [True, True]
        assert not any(fits(grammars, alphabet, grammar, text) for text in ("", "no", other, wrong, weather[:-3]))
    assert fits(grammars, alphabet, many, both)
    assert not fits(grammars, alphabet, one, both)
    parser = (HermesParser if form == "hermes" else Llama3Parser)(["weather", "time"])
    read = parser.push(both).then(parser.flush())
    assert [call.name for call in read.tool_calls if call.name] == ["weather", "time"]
    assert read.content == ""

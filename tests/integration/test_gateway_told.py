"""What a field of a request becomes: what workers are told by the other APIs, and what a template is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from services.protocol import GenerateRequest
from tests.support.stub_system import StubSystem, stub_system
from tests.support.text_model import BOS, make_text_model

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}={{ m.content }};{% endfor %}"
    "effort={{ reasoning_effort }};thinking={{ enable_thinking }};tools={{ tools | length if tools else 0 }};"
    "{% for m in messages %}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}go{% endif %}"
)
HI = {"role": "user", "content": "Hi"}
TOOL = {"name": "weather", "description": "Of a city", "parameters": {"type": "object", "properties": {}}}


@pytest.fixture(scope="module")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StubSystem]:
    model = make_text_model(tmp_path_factory.mktemp("model") / "m", template=TEMPLATE, adds_bos=True)
    with stub_system(model, ["prefill", "decode"]) as system:
        yield system


@pytest.fixture(autouse=True)
def nothing_is_left(stubs: StubSystem) -> Iterator[None]:
    yield from stubs.one_test()


def told(stubs: StubSystem, path: str, **fields: Any) -> tuple[str, GenerateRequest, Any]:
    """The prompt that decode got, all that it got, and the answer."""
    stubs.says("fine")
    response = stubs.post(path, {"model": "stub"} | fields)
    assert response.status_code == 200, response.text
    request = stubs.of_role("decode")[0].calls[-1].request
    prompt = stubs.tokenizer.decode(request.work.prompt_token_ids, skip_special_tokens=False)
    return prompt, request, response.json()


def test_a_template_is_told_what_the_request_says(stubs: StubSystem) -> None:
    def chat(**fields: Any) -> str:
        body = {"messages": [HI]} | fields
        prompt, request, _ = told(stubs, "/v1/chat/completions", **body)
        del body["reasoning_effort" if "reasoning_effort" in body else "messages"]
        if "messages" in body:
            body.setdefault("chat_template_kwargs", {"reasoning_effort": fields["reasoning_effort"]})
        tokens = stubs.post("/tokenize", {"messages": [HI]} | body).json()["tokens"]
        assert tokens == request.work.prompt_token_ids, "/tokenize shows what a chat would be"
        return prompt

    assert chat() == "user=Hi;effort=;thinking=;tools=0;go"
    assert "effort=low;" in chat(reasoning_effort="low")
    assert "thinking=False;" in chat(chat_template_kwargs={"enable_thinking": False})
    assert not chat(add_generation_prompt=False).endswith("go")


def test_the_tokenizers_own_bos_is_added_or_not(stubs: StubSystem) -> None:
    for asked, bos in ((None, BOS), (True, BOS), (False, "")):
        prompt, request, _ = told(stubs, "/v1/completions", prompt="Hi", add_special_tokens=asked)
        assert prompt == bos + "Hi"
        shown = stubs.post("/tokenize", {"prompt": "Hi", "add_special_tokens": asked}).json()
        assert shown["tokens"] == request.work.prompt_token_ids


def test_what_workers_are_told_of_a_response(stubs: StubSystem) -> None:
    sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": -7}
    given = {"metadata": {"run": "1"}, "user": "me"}
    fields: dict[str, Any] = {"input": "Hi", "reasoning": {"effort": "high"}, "tools": [{"type": "function", **TOOL}]}
    prompt, request, answer = told(
        stubs, "/v1/responses", cache_salt="mine", priority=-3, **fields, **sampling, **given
    )
    assert "effort=high;" in prompt
    assert "tools=1;" in prompt
    assert {name: getattr(request.work.sampling, name) for name in sampling} == sampling
    assert {name: answer[name] for name in given} == given
    assert request.work.cache_domain != told(stubs, "/v1/responses", input="Hi")[1].work.cache_domain
    _, request, _ = told(stubs, "/v1/responses", input="Hi", text={"format": {"type": "json_object"}})
    assert request.work.sampling.grammar
    prompt, request, _ = told(stubs, "/v1/responses", input="Hi", tools=fields["tools"], tool_choice="required")
    assert request.work.sampling.grammar
    assert "tools=0;" in told(stubs, "/v1/responses", input="Hi", tools=fields["tools"], tool_choice="none")[0]


def test_what_workers_are_told_of_a_message(stubs: StubSystem) -> None:
    sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": 5}
    tool = {"name": TOOL["name"], "input_schema": TOOL["parameters"]}
    fields: dict[str, Any] = {"messages": [HI], "max_tokens": 7, "tools": [tool]}
    thinking = {"thinking": {"type": "disabled"}, "system": [{"type": "text", "text": "Be brief."}]}
    prompt, request, _ = told(stubs, "/v1/messages", **fields, **sampling, **thinking)
    assert prompt.startswith("system=Be brief.;user=Hi;")
    assert "thinking=False;tools=1;" in prompt
    assert {name: getattr(request.work.sampling, name) for name in sampling} == sampling
    assert request.work.sampling.max_tokens == 7
    count = stubs.post("/v1/messages/count_tokens", {"model": "stub", "messages": [HI], "tools": [tool]} | thinking)
    assert count.json()["input_tokens"] == len(request.work.prompt_token_ids)
    _, request, _ = told(stubs, "/v1/messages", **fields, tool_choice={"type": "any"})
    assert request.work.sampling.grammar

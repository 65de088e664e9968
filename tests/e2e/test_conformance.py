"""Every feature by the real openai client: streamed equals whole, and a pair says what one worker does, byte for byte.

Two systems over one tiny model in fp32: prefill and decode over UCX, behind one gateway and behind two on one port, and
a `both` worker.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.cluster import Cluster, GatewayProcess, free_port, running, wait_until
from tests.support.tiny_model import make_tiny_model

TEMPLATE = (
    "{{ bos_token }}{% if tools %}{{ tools | tojson }} Answer with <tool_call></tool_call>.{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FLAGS = ["--block-size", "16", "--num-blocks", "200", "--dtype", "float32"]
MESSAGES: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "maximum": 99, "minimum": 10},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
WEATHER: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 6}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "additionalProperties": False}}},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", max_position_embeddings=2048)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("template") / "chat.jinja"
    path.write_text(TEMPLATE)
    return path


@pytest.fixture(scope="module")
def pair(model: Path, template: Path) -> Iterator[Cluster]:
    flags = ["--local-prefill-max-tokens", "0", "--chat-template", str(template)]
    with running(
        model, ["prefill", "decode"], worker_flags={"prefill": FLAGS, "decode": FLAGS}, gateway_flags=flags
    ) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def alone(model: Path, template: Path) -> Iterator[Cluster]:
    gateway_flags = ["--chat-template", str(template)]
    with running(model, ["both"], worker_flags={"both": FLAGS}, gateway_flags=gateway_flags) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def gateways(model: Path, template: Path, pair: Cluster) -> Iterator[list[GatewayProcess]]:
    """Two more on one port, before the workers of the pair."""
    url = f"http://127.0.0.1:{free_port()}"
    flags = ("--reuse-port", "--chat-template", str(template), "--local-prefill-max-tokens", "0")
    found = [GatewayProcess(model, [worker.url for worker in pair.workers], *flags, url=url) for _ in range(2)]
    try:
        for gateway in found:
            wait_until(lambda at=gateway.admin_url: _usable(at) == 2, "both workers are usable", gateway, 60)  # type: ignore[misc]
        yield found
    finally:
        statuses = [gateway.stop() for gateway in found]
        for gateway in found:
            gateway.close()
    assert statuses == [0, 0]


@pytest.fixture(scope="module")
def replicas(gateways: list[GatewayProcess], pair: Cluster) -> Cluster:
    """Its client opens a connection a request, so that either gateway may answer it."""
    cluster = Cluster(pair.workers, gateways[0])
    limits = httpx.Limits(max_keepalive_connections=0)
    cluster.client = cluster.client.with_options(http_client=httpx.Client(limits=limits, timeout=120))
    return cluster


@pytest.fixture(params=["one gateway", "two gateways"])
def served(request: pytest.FixtureRequest) -> Cluster:
    """The pair of workers, behind either."""
    name = "pair" if request.param == "one gateway" else "replicas"
    found: Cluster = request.getfixturevalue(name)
    return found


@pytest.fixture(autouse=True)
def nothing_is_left(pair: Cluster, alone: Cluster) -> Iterator[None]:
    yield
    pair.assert_idle()
    alone.assert_idle()


SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 11, "max_tokens": 24}
COMPLETIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": SAMPLED,
    "cut in the vocabulary": SAMPLED | {"extra_body": {"top_k": 20, "min_p": 0.01}, "top_p": 0.9},
    "penalties": SAMPLED
    | {"presence_penalty": 1.5, "frequency_penalty": -0.5, "extra_body": {"repetition_penalty": 1.3}},
    "bias": SAMPLED | {"logit_bias": {"70": 5, "71": -100}},
    "bad words": SAMPLED | {"extra_body": {"bad_words": ["e", "the"]}},
    "allowed tokens": SAMPLED | {"extra_body": {"allowed_token_ids": list(range(60, 100))}},
    "one token": SAMPLED | {"max_tokens": 1},
    "at least": SAMPLED | {"extra_body": {"min_tokens": 24}},
    "three choices": SAMPLED | {"n": 3},
    "two prompts of two": SAMPLED | {"n": 2, "prompt": ["The baton", [70, 71, 72, 73]]},
    "logprobs": SAMPLED | {"logprobs": 3},
    "echo": SAMPLED | {"echo": True},
    "echo scored": SAMPLED | {"echo": True, "logprobs": 2},
    "echo alone": SAMPLED | {"echo": True, "logprobs": 1, "max_tokens": 0},
    "token ids": SAMPLED | {"extra_body": {"return_token_ids": True}},
    "special tokens": SAMPLED | {"extra_body": {"skip_special_tokens": False, "ignore_eos": True}},
    "unicode": SAMPLED | {"prompt": "Naïve 漢字 👩‍💻 "},
    "regex": SAMPLED | {"extra_body": {"guided_regex": "[a-z]{3}-[0-9]{4}"}},
    "choice": SAMPLED | {"extra_body": {"guided_choice": ["yes, of course", "no, never"]}},
    "grammar": SAMPLED | {"extra_body": {"guided_grammar": 'start: "<" NAME ">"\nNAME: /[a-z]{2,5}/'}},
    "json": SAMPLED | {"max_tokens": 80, "extra_body": {"guided_json": PERSON}},
}


def complete(cluster: Cluster, **fields: Any) -> dict[str, Any]:
    defaults: dict[str, Any] = {"model": "tiny", "prompt": "The capital of France is a city of many"}
    answer: dict[str, Any] = cluster.client.completions.create(**defaults | fields).model_dump()
    return answer


def streamed_completion(cluster: Cluster, **fields: Any) -> dict[str, Any]:
    """The chunks put together as the whole answer would be."""
    defaults: dict[str, Any] = {"model": "tiny", "prompt": "The capital of France is a city of many"}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = [chunk.model_dump() for chunk in cluster.client.completions.create(**defaults | fields | options)]
    usage = chunks.pop()["usage"]
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        (part,) = chunk["choices"]
        choice = choices.setdefault(
            part["index"], {"text": "", "logprobs": None, "finish_reason": None, "token_ids": []}
        )
        assert choice["finish_reason"] is None, "nothing comes after the finish"
        choice["text"] += part["text"]
        choice["finish_reason"] = part["finish_reason"]
        choice["token_ids"] += part.get("token_ids") or []
        for name, values in (part["logprobs"] or {}).items():
            choice["logprobs"] = choice["logprobs"] or {}
            choice["logprobs"].setdefault(name, []).extend(values)
    return {"choices": [choices[index] for index in sorted(choices)], "usage": usage}


def told(answer: dict[str, Any]) -> list[Any]:
    """What a client is told, without ids and times, and without what caches change."""
    usage = {name: answer["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    choices = [
        (choice["text"], choice["finish_reason"], choice["logprobs"], choice.get("token_ids") or [])
        for choice in answer["choices"]
    ]
    return [usage, choices]


def equal_but_for_rounding(first: Any, second: Any) -> None:
    """Log probabilities are sums over other batches and chunks in the two systems."""
    if isinstance(first, float) and isinstance(second, float):
        assert first == pytest.approx(second, abs=1e-4)
    elif isinstance(first, list | tuple):
        assert len(first) == len(second)
        for one, other in zip(first, second, strict=True):
            equal_but_for_rounding(one, other)
    elif isinstance(first, dict):
        assert set(first) == set(second)
        for name in first:
            equal_but_for_rounding(first[name], second[name])
    else:
        assert first == second


@pytest.mark.parametrize("name", COMPLETIONS)
def test_a_completion_is_the_same_streamed_or_whole_by_a_pair_or_by_one(
    served: Cluster, alone: Cluster, name: str
) -> None:
    whole = complete(served, **COMPLETIONS[name])
    equal_but_for_rounding(told(streamed_completion(served, **COMPLETIONS[name])), told(whole))
    equal_but_for_rounding(told(complete(alone, **COMPLETIONS[name])), told(whole))


CHATS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": SAMPLED,
    "logprobs": SAMPLED | {"logprobs": True, "top_logprobs": 2},
    "choices": SAMPLED | {"n": 2},
    "json object": SAMPLED | {"max_tokens": 60, "response_format": {"type": "json_object"}},
    "json schema": SAMPLED
    | {"max_tokens": 80, "response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON}}},
    "tools, as it likes": SAMPLED | {"tools": WEATHER},
    "tools, some": SAMPLED | {"max_tokens": 120, "tools": WEATHER, "tool_choice": "required"},
    "tools, this one": SAMPLED
    | {"max_tokens": 80, "tools": WEATHER, "tool_choice": {"type": "function", "function": {"name": "weather"}}},
}


def chat(cluster: Cluster, **fields: Any) -> Any:
    return cluster.client.chat.completions.create(**{"model": "tiny", "messages": MESSAGES} | fields)


def streamed_chat(cluster: Cluster, **fields: Any) -> list[Any]:
    choices: dict[int, list[Any]] = {}
    for chunk in chat(cluster, **fields, stream=True):
        (part,) = chunk.choices
        found = choices.setdefault(part.index, ["", None, [], []])
        found[0] += part.delta.content or ""
        found[1] = part.finish_reason
        for call in part.delta.tool_calls or []:
            if call.function.name:
                found[2].append([call.function.name, ""])
            found[2][call.index][1] += call.function.arguments
        found[3] += [entry.model_dump() for entry in part.logprobs.content] if part.logprobs else []
    return [choices[index] for index in sorted(choices)]


def whole_chat(answer: Any) -> list[Any]:
    return [
        [
            choice.message.content or "",
            choice.finish_reason,
            [[call.function.name, call.function.arguments] for call in choice.message.tool_calls or []],
            [entry.model_dump() for entry in choice.logprobs.content] if choice.logprobs else [],
        ]
        for choice in answer.choices
    ]


@pytest.mark.parametrize("name", CHATS)
def test_a_chat_is_the_same_streamed_or_whole_by_a_pair_or_by_one(served: Cluster, alone: Cluster, name: str) -> None:
    whole = whole_chat(chat(served, **CHATS[name]))
    equal_but_for_rounding(streamed_chat(served, **CHATS[name]), whole)
    equal_but_for_rounding(whole_chat(chat(alone, **CHATS[name])), whole)


@pytest.mark.parametrize("seed", range(4))
def test_structured_output_is_what_was_asked_for(served: Cluster, seed: int) -> None:
    fields: dict[str, Any] = {"temperature": 1.0, "seed": seed, "max_tokens": 400}
    person = json.loads(complete(served, **fields, extra_body={"guided_json": PERSON})["choices"][0]["text"])
    assert set(person) == {"name", "age"}
    assert 10 <= person["age"] <= 99
    text = complete(served, **fields, extra_body={"guided_regex": "[a-z]{3}-[0-9]{4}"})["choices"][0]["text"]
    assert re.fullmatch("[a-z]{3}-[0-9]{4}", text)
    calls = chat(served, **fields, tools=WEATHER, tool_choice="required", parallel_tool_calls=False).choices[0]
    assert calls.finish_reason == "tool_calls"
    (call,) = calls.message.tool_calls
    expected = {"weather": {"city"}, "time": set()}
    assert set(json.loads(call.function.arguments)) == expected[call.function.name]


def test_a_grammar_the_workers_were_not_told_of_before_is_refused_by_name(served: Cluster) -> None:
    response = served.post("/v1/completions", {"model": "tiny", "prompt": "a", "guided_regex": "("})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "guided_regex")


def test_choices_of_one_prompt_compute_and_ship_it_once(model: Path) -> None:
    """The others find all full blocks of it on decode, and decode computes the few tokens that are left."""
    flags = {"prefill": FLAGS, "decode": FLAGS}
    with running(model, ["prefill", "decode"], worker_flags=flags) as cluster:
        prompt = list(range(20, 120))
        answer = complete(cluster, prompt=prompt, n=4, max_tokens=16, temperature=1.0, seed=3)
        record = cluster.gateway.record(answer["id"])
        assert cluster.of_role("decode")[0].ledger()["receiver"]["committed"] == 1
        assert [attempt["prefill"] is not None for attempt in record["attempts"]].count(True) == 1
        assert answer["usage"]["prompt_tokens"] == len(prompt)
        assert len({choice["text"] for choice in answer["choices"]}) == 4, "each draws for itself"
        again = complete(cluster, prompt=prompt, n=4, max_tokens=16, temperature=1.0, seed=3)
        assert [choice["text"] for choice in again["choices"]] == [choice["text"] for choice in answer["choices"]]
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == len(prompt) // 16 * 16
        cluster.assert_idle()


def test_grammars_survive_preemption(model: Path, pair: Cluster) -> None:
    """A pool too small for all of them at once: some are preempted, and go on in the middle of their grammar."""
    body: dict[str, Any] = {"guided_regex": "[a-z]{40}-[0-9]{40}"}
    fields: dict[str, Any] = {"temperature": 1.0, "max_tokens": 100, "extra_body": body}
    small = ["--block-size", "8", "--num-blocks", "40", "--dtype", "float32"]
    with running(model, ["both"], worker_flags={"both": small}) as cluster:
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda seed: complete(cluster, seed=seed, **fields), range(8)))
        records = [cluster.gateway.record(answer["id"]) for answer in answers]
        assert sum(record["decode"].get("num_preemptions", 0) for record in records) > 0, "nothing was preempted"
        cluster.assert_idle()
    for seed, answer in enumerate(answers):
        text = answer["choices"][0]["text"]
        assert re.fullmatch(body["guided_regex"], text)
        assert text == complete(pair, seed=seed, **fields)["choices"][0]["text"]


def test_responses_and_messages_run_on_real_workers(served: Cluster, alone: Cluster) -> None:
    texts = set()
    for cluster in (served, alone):
        answer = cluster.client.responses.create(model="tiny", input="Hi", max_output_tokens=12, temperature=0)
        events = list(
            cluster.client.responses.create(model="tiny", input="Hi", max_output_tokens=12, temperature=0, stream=True)
        )
        assert events[-1].response.output_text == answer.output_text
        body = {"model": "tiny", "max_tokens": 12, "temperature": 0, "messages": [{"role": "user", "content": "Hi"}]}
        message = cluster.post("/v1/messages", body).json()
        assert message["content"][0]["text"] == answer.output_text
        texts.add(answer.output_text)
    assert len(texts) == 1


def test_two_gateways_on_one_port_are_one(replicas: Cluster, gateways: list[GatewayProcess], pair: Cluster) -> None:
    """Each request on a connection of its own, which the kernel gives to either."""
    before = [_num_served(gateway) for gateway in gateways]
    expected = complete(pair, **SAMPLED)["choices"][0]["text"]
    for _ in range(24):
        assert complete(replicas, **SAMPLED)["choices"][0]["text"] == expected
    served = [_num_served(gateway) - count for gateway, count in zip(gateways, before, strict=True)]
    assert sum(served) == 24
    assert min(served) > 0, "both had a share"


def _num_served(gateway: GatewayProcess) -> int:
    return len(httpx.get(gateway.admin_url + "/debug/requests", timeout=5).json())


def _usable(admin_url: str) -> int:
    workers = httpx.get(admin_url + "/debug/cluster", timeout=5).json()["workers"]
    return sum(worker["usable"] for worker in workers)

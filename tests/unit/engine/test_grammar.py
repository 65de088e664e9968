"""Grammars: a function of the output tokens, bounded in what they cost, and with the last word in sampling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ConfigError, InvalidRequest
from engine.grammar import Grammars, check_grammar
from engine.messages import AddRequest, Buffer, EngineRequest, Finished, Refused, TokenOut
from engine.runner import SampledToken, SampleInput, Slots, StepBatch
from engine.sampler import sample
from engine.sampling_params import SamplingParams
from tests.support.text_model import make_text_model

EOS = 2


def schema(**fields: Any) -> str:
    return json.dumps({"grammars": [{"json_schema": fields}]})


def lark(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text}]})


PERSON = schema(
    type="object",
    properties={"name": {"type": "string"}, "age": {"type": "integer"}},
    required=["name", "age"],
    additionalProperties=False,
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_text_model(tmp_path_factory.mktemp("model") / "m")


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


@pytest.fixture(scope="module")
def grammars(directory: Path, tokenizer: Tokenizer) -> Grammars:
    """Of a model whose vocabulary is padded, as many are."""
    return Grammars(directory / "tokenizer.json", tokenizer.get_vocab_size() + 7, [EOS, 4])


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def test_what_is_allowed_is_what_the_grammar_says(grammars: Grammars, tokenizer: Tokenizer) -> None:
    state = grammars.state(lark('start: "yes" | "no"'))
    first = {tokenizer.id_to_token(int(i)) for i in np.flatnonzero(state.allowed([]))}
    assert {token[0] for token in first} == {"y", "n"}
    done = state.allowed(encode(tokenizer, "yes"))
    assert set(np.flatnonzero(done)) == {EOS, 4}, "both end tokens, and nothing else"


def test_the_state_is_a_function_of_the_output_alone(grammars: Grammars, tokenizer: Tokenizer) -> None:
    """So a worker that takes over at any point goes on as the one before would have."""
    output = encode(tokenizer, '{"name": "Ada é", "age": 36}')
    step_by_step = grammars.state(PERSON)
    for position in range(len(output) + 1):
        here = step_by_step.allowed(output[:position])
        taken_over = grammars.state(PERSON).allowed(output[:position])
        assert (here == taken_over).all(), position
        if position < len(output):
            assert here[output[position]], position
    assert here[EOS]


def test_two_requests_of_one_grammar_do_not_share_their_state(grammars: Grammars, tokenizer: Tokenizer) -> None:
    first, second = grammars.state(PERSON), grammars.state(PERSON)
    before = second.allowed([]).copy()
    first.allowed(encode(tokenizer, '{"name"'))
    assert (second.allowed([]) == before).all()


def test_an_output_that_does_not_fit_is_a_problem_not_a_guess(grammars: Grammars, tokenizer: Tokenizer) -> None:
    state = grammars.state(PERSON)
    state.allowed(encode(tokenizer, "[1]"))
    assert "does not fit" in state.problem


@pytest.mark.parametrize(
    "grammar",
    [
        "rubbish",
        "{}",
        schema(type="strin"),
        schema(**{"not": {"type": "string"}}),
        schema(**{"$ref": "http://elsewhere.example/schema"}),
        lark("start: /(/"),
        lark("begin: /a/"),
        lark('start: "' + "a" * 300_000 + '"'),
    ],
)
def test_a_grammar_that_cannot_be_used_is_refused(grammars: Grammars, grammar: str) -> None:
    for refuse in (check_grammar, grammars.prepare, grammars.state):
        with pytest.raises(InvalidRequest) as refused:
            refuse(grammar)
        assert refused.value.param == "response_format"


@pytest.mark.parametrize(
    "grammar",
    [
        lark("start: /((a{1,1000}){1,1000}){1,1000}/"),
        lark("start: /(.*a.{30}b.*)&(.*c.{30}.*)/"),
        lark('start: a\na: a "x" | ""'),
        schema(**{"$ref": "#"}),
        schema(type="array", minItems=10**9),
        schema(type="object", properties={f"p{i}": {"type": "string", "pattern": "(a|b)*c{1,50}"} for i in range(500)}),
    ],
)
def test_a_hostile_grammar_is_refused_or_bounded(grammars: Grammars, tokenizer: Tokenizer, grammar: str) -> None:
    """None of these may hang or take the process along; what cannot go on says so."""
    try:
        state = grammars.state(grammar)
    except InvalidRequest:
        return
    output: list[int] = []
    for _ in range(20):
        allowed = state.allowed(output)
        if state.problem or allowed[EOS]:
            return
        output.append(int(np.flatnonzero(allowed)[0]))


def test_a_model_without_a_tokenizer_has_no_grammars(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tokenizer"):
        Grammars(tmp_path / "tokenizer.json", 100, [2]).prepare(PERSON)


# In the sampler


def test_a_grammar_has_the_last_word() -> None:
    allowed = np.zeros(8, dtype=np.bool_)
    allowed[[2, 5]] = True
    raw = torch.tensor([9.0, 8, 1, 7, 6, 0, 5, 4])

    def chosen(**fields: Any) -> int:
        params = SamplingParams(**{"max_tokens": 9, "temperature": 0.0, "stop_token_ids": (2,)} | fields)
        return sample(raw[None], [SampleInput(params, 0, (1,), (), allowed)])[0].token_id

    assert chosen() == 2
    assert chosen(min_tokens=1) == 5
    assert chosen(logit_bias={2: -100.0}) == 5
    assert chosen(bad_words=((5,),), min_tokens=1) == 2, "nothing else is left"
    assert chosen(logit_bias={2: -100.0, 5: -100.0}) in (2, 5)
    assert {chosen(temperature=2.0, seed=seed) for seed in range(60)} == {2, 5}


def test_log_probabilities_are_those_of_the_model_without_its_grammar() -> None:
    allowed = np.zeros(4, dtype=np.bool_)
    allowed[3] = True
    raw = torch.tensor([[4.0, 3, 2, 1]])
    params = SamplingParams(max_tokens=9, temperature=0.0, logprobs=1)
    (token,) = sample(raw, [SampleInput(params, 0, (1,), (), allowed)])
    assert token.token_id == 3
    assert token.logprobs is not None
    assert token.logprobs.logprob == pytest.approx(float(torch.log_softmax(raw[0], -1)[3]))
    assert token.logprobs.top[0][0] == 0


# In the engine


class FirstAllowed:
    """A runner without a model: samples the first token that is allowed."""

    kv_bytes_per_token = 8

    def execute(self, batch: StepBatch) -> list[SampledToken]:
        rows = [seq.sample.allowed for seq in batch.seqs if seq.sample is not None]
        return [SampledToken(int(np.flatnonzero(row)[0]) if row is not None else 9, None) for row in rows]

    def read_kv(self, slots: Slots, buffer: Buffer) -> None: ...

    def write_kv(self, slots: Slots, buffer: Buffer) -> None: ...


def engine(grammars: Grammars | None) -> Engine:
    return Engine(EngineConfig(num_blocks=16, max_model_len=64, block_size=4), FirstAllowed(), 407, grammars=grammars)


def outputs(one: Engine, grammar: str, max_tokens: int = 30, output: tuple[int, ...] = ()) -> tuple[list[int], Any]:
    params = SamplingParams(max_tokens=max_tokens, stop_token_ids=(EOS,), grammar=grammar)
    events = one.handle(AddRequest(EngineRequest("r", (5, 6, 7), params, output)), 0.0)
    while not any(isinstance(event, Finished | Refused) for event in events):
        events += one.step(0.0)
    return [event.token_id for event in events if isinstance(event, TokenOut)], events[-1]


def test_a_request_follows_its_grammar_to_the_end(grammars: Grammars, tokenizer: Tokenizer) -> None:
    made, ended = outputs(engine(grammars), lark('start: "yes" " no"?'))
    assert ended.reason == "stop"
    assert made[-1] == EOS
    assert tokenizer.decode(made, skip_special_tokens=True) == "yes"


def test_a_request_goes_on_in_the_middle_of_its_grammar(grammars: Grammars, tokenizer: Tokenizer) -> None:
    whole, _ = outputs(engine(grammars), lark('start: "one two three"'))
    for cut in range(1, len(whole) - 1):
        rest, ended = outputs(engine(grammars), lark('start: "one two three"'), output=tuple(whole[:cut]))
        assert (rest, ended.reason) == (whole[cut:], "stop")


def test_an_output_that_does_not_fit_ends_the_request_with_an_error(grammars: Grammars) -> None:
    made, ended = outputs(engine(grammars), PERSON, output=(9, 9))
    assert (made, ended.reason) == ([], "error")
    assert "does not fit" in ended.message


def test_what_cannot_be_followed_is_refused_at_once(grammars: Grammars) -> None:
    for one, grammar in ((engine(None), PERSON), (engine(grammars), "rubbish")):
        made, refused = outputs(one, grammar)
        assert made == []
        assert isinstance(refused, Refused)
        assert (refused.reason, refused.param) == ("invalid", "response_format")
        assert one.is_empty()

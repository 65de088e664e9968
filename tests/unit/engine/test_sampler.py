from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from engine.counter_rng import uniform
from engine.runner import SampleInput
from engine.sampler import sample
from engine.sampling_params import SamplingParams

VOCAB = 60
PROMPT = (3, 3, 3, 3, 3, 7)


def row(index: int = 0, outputs: tuple[int, ...] = (), prompt: tuple[int, ...] = PROMPT, **fields: Any) -> SampleInput:
    params = SamplingParams(**{"max_tokens": 50, "seed": 42} | fields)
    return SampleInput(params, index, prompt, outputs)


def logits(seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(0, scale, VOCAB).astype(np.float32))


def reference(raw: torch.Tensor, inputs: SampleInput) -> int:
    """The same choice in a few lines of numpy, in double precision."""
    p, x = inputs.params, raw.double().numpy().copy()
    for token, bias in p.logit_bias.items():
        x[token] += bias
    for token in {*inputs.prompt_token_ids, *inputs.output_token_ids}:
        x[token] = x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
    for token in set(inputs.output_token_ids):
        x[token] -= p.presence_penalty + p.frequency_penalty * list(inputs.output_token_ids).count(token)
    if inputs.output_index < p.min_tokens:
        x[list(p.stop_token_ids)] = -1e300
    if p.greedy:
        return int(x.argmax())
    x = x / p.temperature
    probs = np.exp(x - x.max())
    probs /= probs.sum()
    order = sorted(range(VOCAB), key=lambda token: (-probs[token], token))
    keep = order[: p.top_k] if p.top_k else order
    total, mass, nucleus = sum(probs[token] for token in keep), 0.0, []
    for token in keep:
        nucleus.append(token)
        mass += probs[token]
        if mass >= p.top_p * total:
            break
    kept = [token for token in nucleus if probs[token] >= p.min_p * probs.max()]
    draw, cumulative = uniform(p.seed, p.choice, inputs.output_index) * sum(probs[token] for token in kept), 0.0
    for token in sorted(kept):
        cumulative += probs[token]
        if draw < cumulative:
            return token
    return sorted(kept)[-1]


CASES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1e-7},
    {"temperature": 1.0},
    {"temperature": 2.0, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.5},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.05},
    {"temperature": 1.3, "min_p": 0.2},
    {"temperature": 0.0, "repetition_penalty": 1.5},
    {"temperature": 0.0, "presence_penalty": 2.0},
    {"temperature": 0.9, "frequency_penalty": 1.0, "presence_penalty": -1.0},
    {"temperature": 0.0, "logit_bias": {11: 100.0}},
    {"temperature": 1.0, "logit_bias": {11: -100.0, 12: 3.0}},
    {"temperature": 1.0, "stop_token_ids": (5, 6), "min_tokens": 9},
    {"temperature": 1e-4},
]


@pytest.mark.parametrize("fields", CASES)
def test_a_row_equals_the_reference_at_every_position(fields: dict[str, Any]) -> None:
    for index in range(40):
        raw = logits(index)
        inputs = row(index, outputs=tuple(range(index % 10)), **fields)
        assert sample(raw[None], [inputs])[0].token_id == reference(raw, inputs)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    raws = torch.stack([logits(i) for i in range(len(CASES))])
    inputs = [row(i, outputs=(1, 2, 2), **fields) for i, fields in enumerate(CASES)]
    together = [token.token_id for token in sample(raws, inputs)]
    alone = [sample(raws[i : i + 1], [inputs[i]])[0].token_id for i in range(len(CASES))]
    assert together == alone
    assert [token.token_id for token in sample(raws.flip(0), inputs[::-1])] == together[::-1]


def test_a_seed_draws_the_same_at_the_same_position_and_choices_differ() -> None:
    raw = logits(0, scale=0.1)

    def run(**fields: Any) -> list[int]:
        return [sample(raw[None], [row(i, temperature=1.0, **fields)])[0].token_id for i in range(30)]

    assert run() == run()
    assert run() != run(seed=43)
    assert run() != run(choice=1)


def test_presence_and_frequency_leave_the_first_token_alone_and_repetition_sees_the_prompt() -> None:
    raw = torch.zeros(VOCAB)
    raw[3], raw[9] = 2.0, 1.9
    for penalty in ({"presence_penalty": 2.0}, {"frequency_penalty": 1.0}):
        assert sample(raw[None], [row(temperature=0.0, **penalty)])[0].token_id == 3
        assert sample(raw[None], [row(1, (3,), temperature=0.0, **penalty)])[0].token_id == 9
    assert sample(raw[None], [row(temperature=0.0, repetition_penalty=1.5)])[0].token_id == 9


def test_log_probabilities_are_the_models_own_whatever_was_asked_for() -> None:
    raw = logits(4)
    expected = raw.log_softmax(-1)
    [token] = sample(raw[None], [row(temperature=0.0, logprobs=3, logit_bias={20: 100.0})])
    assert token.token_id == 20
    assert token.logprobs is not None
    assert token.logprobs.logprob == pytest.approx(float(expected[20]), abs=1e-6)
    values, ids = expected.topk(3)
    assert [token_id for token_id, _ in token.logprobs.top] == ids.tolist()
    assert [value for _, value in token.logprobs.top] == pytest.approx(values.tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_extremes_give_a_token_and_no_nan_in_any_precision(dtype: torch.dtype) -> None:
    raws = torch.stack([logits(1), logits(2), torch.full((VOCAB,), -math.inf), logits(3) * 1e4]).to(dtype)
    inputs = [
        row(temperature=1e-7),
        row(temperature=2.0, top_p=1e-9),
        row(temperature=0.0, logit_bias={1: -100.0}),
        row(temperature=1e-4),
    ]
    tokens = [token.token_id for token in sample(raws, inputs)]
    assert all(0 <= token < VOCAB for token in tokens)
    assert tokens[0] == int(raws[0].float().argmax())
    assert tokens[1] == int(raws[1].float().argmax())
    assert tokens[3] == int(raws[3].float().argmax())


def test_broken_logits_give_a_token_and_finite_log_probabilities() -> None:
    broken = torch.stack([torch.full((VOCAB,), math.nan), torch.full((VOCAB,), -math.inf), logits(1)])
    broken[2, 5], broken[2, 6] = math.nan, math.inf
    for fields in ({"temperature": 1.0, "top_p": 0.9}, {"temperature": 1e-4, "top_k": 3}, {"temperature": 2.0}):
        tokens = sample(broken, [row(logprobs=4, **fields)] * 3)
        assert all(0 <= token.token_id < VOCAB for token in tokens)
        assert tokens[2].token_id == 6
        for token in tokens:
            assert token.logprobs is not None
            assert all(map(math.isfinite, [token.logprobs.logprob, *(value for _, value in token.logprobs.top)]))


@pytest.mark.parametrize("fields", [{"top_k": 7}, {"top_p": 0.3}, {"top_p": 0.999}, {"top_k": 40, "top_p": 0.6}])
@pytest.mark.parametrize("scale", [0.0, 0.5, 4.0])
def test_truncation_of_a_large_vocabulary_keeps_what_a_whole_sort_keeps(fields: dict[str, Any], scale: float) -> None:
    """Rounded logits: most tokens are tied, and of those at the edge the lowest ids stay."""
    vocab_size = 5000
    raw = torch.from_numpy(np.random.default_rng(3).normal(0, scale, vocab_size).astype(np.float32)).round()
    probs = raw.softmax(-1).double()
    order = sorted(range(vocab_size), key=lambda token: (-float(probs[token]), token))[
        : fields.get("top_k", vocab_size)
    ]
    reached = probs[order].cumsum(0) - probs[order] < fields.get("top_p", 1.0) * probs[order].sum()
    allowed = {token for token, kept in zip(order, reached.tolist(), strict=True) if kept}
    drawn = {sample(raw[None], [row(index, temperature=1.0, **fields)])[0].token_id for index in range(400)}
    assert drawn <= allowed
    if len(allowed) < 10:
        assert drawn == allowed


def test_everything_forbidden_still_gives_a_token() -> None:
    inputs = row(temperature=1.0, stop_token_ids=tuple(range(VOCAB)), min_tokens=5)
    assert 0 <= sample(logits(0)[None], [inputs])[0].token_id < VOCAB


def test_an_impossible_row_never_becomes_possible() -> None:
    raw = torch.full((VOCAB,), -math.inf)
    raw[17] = 0.0
    for index in range(50):
        assert sample(raw[None], [row(index, temperature=2.0)])[0].token_id == 17


def favourites(raw: torch.Tensor) -> list[int]:
    """Token ids, likeliest first."""
    return sorted(range(VOCAB), key=lambda token: -float(raw[token]))


def chosen(raw: torch.Tensor, inputs: SampleInput) -> int:
    return sample(raw[None], [inputs])[0].token_id


def test_a_forbidden_word_is_never_completed() -> None:
    raw = logits()
    first, second, third = favourites(raw)[:3]
    words = ((first,), (9, second), (8, 9, third))
    assert chosen(raw, row(1, (5,), temperature=0.0, bad_words=words)) == second
    assert chosen(raw, row(1, (9,), temperature=0.0, bad_words=words)) == third
    assert chosen(raw, row(2, (8, 9), temperature=0.0, bad_words=words)) == favourites(raw)[3]
    assert chosen(raw, row(0, (), (8, 9), temperature=0.0, bad_words=words)) == second, "a prompt is not searched"
    for seed in range(200):
        assert chosen(raw, row(2, (8, 9), seed=seed, bad_words=words)) not in (first, second, third)


def test_only_allowed_tokens_are_sampled() -> None:
    raw = logits()
    allowed = tuple(favourites(raw)[-3:])
    assert chosen(raw, row(temperature=0.0, allowed_token_ids=allowed)) == allowed[0]
    drawn = {chosen(raw, row(seed=seed, temperature=2.0, allowed_token_ids=allowed)) for seed in range(100)}
    assert drawn == set(allowed)
    assert chosen(raw, row(temperature=0.0, allowed_token_ids=allowed, bad_words=((allowed[0],),))) == allowed[1]


def test_a_neighbour_with_forbidden_words_changes_nothing_for_the_others() -> None:
    raw = torch.stack([logits(1), logits(2)])
    plain, bound = row(temperature=0.0), row(temperature=0.0, bad_words=((favourites(raw[1])[0],),))
    assert sample(raw, [plain, bound])[0] == sample(raw[:1], [plain])[0]

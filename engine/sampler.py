"""Choosing tokens: logits in, one token a row out. Called by the model runner, on the engine thread.

Arithmetic is fp32. A row's result depends on its own logits and history only, never on its neighbours: rows share
nothing but the argmax of a batch that is greedy throughout. The order of a row is

    log probabilities of the raw logits -> min_tokens, logit_bias, penalties -> greedy: argmax
    -> temperature -> top_k -> top_p -> min_p -> one uniform draw through the cumulative distribution
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.counter_rng import uniform
from engine.messages import TokenLogprobs
from engine.runner import SampledToken, SampleInput
from engine.sampling_params import SamplingParams

LOWEST = torch.finfo(torch.float32).min
"""Stands for "never" in place of -inf: a row that forbids everything still has a likeliest token, and no NaN."""

LARGEST = 1e30
"""More than any logit, and small enough to be divided by the least temperature."""


def sample(logits: torch.Tensor, inputs: Sequence[SampleInput]) -> list[SampledToken]:
    """`logits` (len(inputs), vocab_size), of any float dtype, on any device; not changed."""
    if not inputs:
        return []
    logits = logits.float()
    if all(_plain_greedy(row.params) and not _forbids_stop(row) for row in inputs):
        return [SampledToken(token_id, None) for token_id in logits.argmax(dim=-1).tolist()]
    return [_sample_row(logits[i], row) for i, row in enumerate(inputs)]


def _plain_greedy(params: SamplingParams) -> bool:
    return params.greedy and params.logprobs is None and not params.logit_bias and not _has_penalties(params)


def _has_penalties(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


def _forbids_stop(row: SampleInput) -> bool:
    """The token about to be sampled may not end the request yet."""
    return bool(row.params.stop_token_ids) and row.output_index < row.params.min_tokens


def _sample_row(raw: torch.Tensor, row: SampleInput) -> SampledToken:
    """`raw` (vocab_size,) fp32."""
    params = row.params
    logits = _adjust(raw, row)
    if params.greedy:
        token_id = int(logits.argmax())
    else:
        draw = uniform(params.seed, params.choice, row.output_index)
        # Infinities (fp16 overflows, masks) would make NaN of the distribution; these bounds survive the division.
        bounded = logits.clamp(-LARGEST, LARGEST)
        token_id = _draw(bounded / params.temperature, params, draw)
    if params.logprobs is None:
        return SampledToken(token_id, None)
    return SampledToken(token_id, _logprobs(raw, token_id, params.logprobs))


def _adjust(raw: torch.Tensor, row: SampleInput) -> torch.Tensor:
    """A copy with masks, biases and penalties in it, or `raw` itself when there are none."""
    params = row.params
    if not (_forbids_stop(row) or params.logit_bias or _has_penalties(params)):
        return raw
    logits = raw.clone()
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=raw.device)
        logits[ids] += torch.tensor(list(params.logit_bias.values()), dtype=torch.float32, device=raw.device)
    if _has_penalties(params):
        _penalize(logits, row)
    if _forbids_stop(row):
        logits[torch.tensor(params.stop_token_ids, device=raw.device)] = LOWEST
    return logits


def _penalize(logits: torch.Tensor, row: SampleInput) -> None:
    """Repetition over prompt and output, presence and frequency over output only; in place."""
    params = row.params
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*row.prompt_token_ids, *row.output_token_ids}), device=logits.device)
        values = logits[seen]
        penalty = params.repetition_penalty
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if row.output_token_ids and (params.presence_penalty or params.frequency_penalty):
        made = torch.tensor(list(row.output_token_ids), device=logits.device)
        ids, counts = torch.unique(made, return_counts=True)
        logits[ids] -= params.presence_penalty + params.frequency_penalty * counts.float()


def _draw(logits: torch.Tensor, params: SamplingParams, draw: float) -> int:
    """The token whose share of the cumulative distribution, in vocabulary order, holds `draw` in [0, 1)."""
    probs = torch.softmax(logits, dim=-1)
    keep = _kept(probs, params)
    if keep is not None:
        probs = torch.where(keep, probs, 0.0)
    cumulative = probs.double().cumsum(dim=-1)
    index = int(torch.searchsorted(cumulative, cumulative[-1] * draw, right=True))
    # The product may round up to the total: then the last token with a share is meant.
    return index if index < len(probs) else int(probs.nonzero()[-1])


def _kept(probs: torch.Tensor, params: SamplingParams) -> torch.Tensor | None:
    """Which tokens top_k, top_p and min_p leave, as a mask; None leaves all. The likeliest token always stays.
    Of equally likely ones those with the lower ids stay."""
    vocab_size = len(probs)
    keep: torch.Tensor | None = None
    if 0 < params.top_k < vocab_size or params.top_p < 1.0:
        ordered, ids = probs.sort(descending=True, stable=True)
        if 0 < params.top_k < vocab_size:
            ordered, ids = ordered[: params.top_k], ids[: params.top_k]
        if params.top_p < 1.0:
            # The smallest set whose mass reaches top_p of what top_k has left.
            before = ordered.double().cumsum(dim=-1) - ordered.double()
            ids = ids[before < params.top_p * float(ordered.double().sum())]
        keep = torch.zeros(vocab_size, dtype=torch.bool, device=probs.device)
        keep[ids] = True
    if params.min_p > 0.0:
        likely = probs >= params.min_p * probs.max()
        keep = likely if keep is None else keep & likely
    return keep


def _logprobs(raw: torch.Tensor, token_id: int, num_top: int) -> TokenLogprobs:
    """Of the model's own distribution, before anything the request asked for."""
    logprobs = torch.log_softmax(raw, dim=-1)
    values, ids = logprobs.topk(num_top) if num_top else (logprobs[:0], logprobs[:0])
    top = tuple((int(i), float(value)) for i, value in zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprobs(float(logprobs[token_id]), top)

"""Choosing tokens: logits in, one token a row out. Called by the model runner, on the engine thread.

Arithmetic is fp32. A row's result depends on its own logits and history only, never on its neighbours: rows share
nothing but the argmax of a batch that is greedy throughout. The order of a row is

    log probabilities of the raw logits -> logit_bias, penalties, forbidden tokens, grammar -> greedy: argmax
    -> temperature -> top_k -> top_p -> min_p -> one uniform draw through the cumulative distribution
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.counter_rng import uniform
from engine.messages import TokenLogprobs
from engine.runner import SampledToken, SampleInput
from engine.sampling_params import SamplingParams

LOWEST = torch.finfo(torch.float32).min
"""Stands for "never" in place of -inf: a row that forbids everything still has a likeliest token, and no NaN."""

TRIED_FACTORS = (512.0, 32.0, 1.0)
"""How far above the bound that surely holds top_p's tokens to look first: see _largest."""

ROUNDING = 1e-9
"""More than the error of a double-precision sum over a vocabulary of probabilities."""

LARGEST = 1e30
"""More than any logit, and small enough to be divided by the least temperature."""


def sample(logits: torch.Tensor, inputs: Sequence[SampleInput]) -> list[SampledToken]:
    """`logits` (len(inputs), vocab_size), of any float dtype, on any device; not changed."""
    if not inputs:
        return []
    logits = logits.float()
    if all(row.params.greedy and row.params.logprobs is None and not _adjusts(row) for row in inputs):
        return [SampledToken(token_id, None) for token_id in _likeliest(logits)]
    return [_sample_row(logits[i], row) for i, row in enumerate(inputs)]


def _likeliest(logits: torch.Tensor) -> list[int]:
    """Of each row; of equals the first."""
    if logits.device.type == "cpu":
        # More than ten times faster than torch's.
        rows: list[int] = logits.numpy().argmax(axis=-1).tolist()
        return rows
    return logits.argmax(dim=-1).tolist()


def _adjusts(row: SampleInput) -> bool:
    """Whether anything but the model has a say in the logits of this row."""
    params = row.params
    forbids = params.bad_words or params.allowed_token_ids or row.allowed is not None or _forbids_stop(row)
    return bool(forbids or params.logit_bias or _has_penalties(params))


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
        token_id = _draw(_bounded(logits) / params.temperature, params, draw)
    if params.logprobs is None:
        return SampledToken(token_id, None)
    return SampledToken(token_id, _logprobs(raw, token_id, params.logprobs))


def _bounded(logits: torch.Tensor) -> torch.Tensor:
    """Without what would make NaN of a distribution: infinities (fp16 overflows, masks), and NaN itself, which
    counts as impossible."""
    return logits.nan_to_num(nan=-LARGEST).clamp(-LARGEST, LARGEST)


def _adjust(raw: torch.Tensor, row: SampleInput) -> torch.Tensor:
    """A copy with masks, biases and penalties in it, or `raw` itself when there are none."""
    params = row.params
    if not _adjusts(row):
        return raw
    logits = raw.clone()
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=raw.device)
        logits[ids] += torch.tensor(list(params.logit_bias.values()), dtype=torch.float32, device=raw.device)
    if _has_penalties(params):
        _penalize(logits, row)
    if params.allowed_token_ids:
        allowed = torch.tensor(params.allowed_token_ids, device=raw.device)
        logits = torch.full_like(logits, LOWEST).scatter(0, allowed, logits[allowed])
    forbidden = _completed(params.bad_words, row.output_token_ids)
    if _forbids_stop(row):
        forbidden += params.stop_token_ids
    if forbidden:
        logits[torch.tensor(forbidden, device=raw.device)] = LOWEST
    return logits if row.allowed is None else _follow(logits, row.allowed, forbidden)


def _follow(logits: torch.Tensor, allowed: npt.NDArray[np.bool_], forbidden: list[int]) -> torch.Tensor:
    """A grammar has the last word: where all that it allows is forbidden otherwise, it is allowed all the same."""
    if forbidden:
        left = allowed.copy()
        left[forbidden] = False
        allowed = left if left.any() else allowed
    mask = torch.from_numpy(allowed).to(logits.device)
    return torch.where(mask, _bounded(logits).clamp(min=-LARGEST / 2), LOWEST)


def _completed(words: Sequence[Sequence[int]], output: Sequence[int]) -> list[int]:
    """Tokens that would complete one of `words` if they followed `output`."""
    return [word[-1] for word in words if list(output[len(output) - len(word) + 1 :]) == list(word[:-1])]


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
    keep: torch.Tensor | None = None
    if 0 < params.top_k < len(probs) or params.top_p < 1.0:
        ordered, mass = _largest(probs, params)
        num_kept = len(ordered)
        if params.top_p < 1.0:
            # The smallest set whose mass reaches top_p of what top_k has left.
            before = ordered.double().cumsum(dim=-1) - ordered.double()
            num_kept = max(1, int((before < params.top_p * mass).sum()))
        least = ordered[num_kept - 1]
        keep = probs > least
        ties = (probs == least).nonzero().squeeze(-1)
        keep[ties[: num_kept - int(keep.sum())]] = True
    if params.min_p > 0.0:
        likely = probs >= params.min_p * probs.max()
        keep = likely if keep is None else keep & likely
    return keep


def _largest(probs: torch.Tensor, params: SamplingParams) -> tuple[torch.Tensor, float]:
    """Probabilities, descending, that hold all that top_k and top_p leave, and the mass that top_p is a share of.

    Sorting a vocabulary costs more than many a layer, so only what a bound cannot rule out is sorted.
    """
    if 0 < params.top_k < len(probs):
        ordered = probs.topk(params.top_k).values
        return ordered, float(ordered.double().sum())
    mass = float(probs.double().sum())
    # Tokens below this add up to less than 1 - top_p, so the others surely reach top_p; usually those far above it do.
    surely = (1.0 - params.top_p) / len(probs)
    for factor in TRIED_FACTORS:
        values = probs[probs >= surely * factor]
        if float(values.double().sum()) >= params.top_p * mass + ROUNDING:
            return _descending(values), mass
    return _descending(probs), mass


def _descending(values: torch.Tensor) -> torch.Tensor:
    if values.device.type == "cpu":
        # Several times faster than torch's, which sorts indices along.
        return torch.from_numpy(np.sort(values.numpy())).flip(0)
    return values.sort(descending=True).values


def score(logits: torch.Tensor, token_ids: Sequence[int], num_top: int) -> tuple[TokenLogprobs, ...]:
    """`logits` (len(token_ids), vocab_size): log probabilities of the token that follows each row, a row at a time,
    so that a prompt needs no second copy of its logits."""
    return tuple(_logprobs(row, token_id, num_top) for row, token_id in zip(logits.float(), token_ids, strict=True))


def _logprobs(raw: torch.Tensor, token_id: int, num_top: int) -> TokenLogprobs:
    """Of the model's own distribution, before anything the request asked for."""
    logprobs = torch.log_softmax(_bounded(raw), dim=-1)
    values, ids = logprobs.topk(num_top) if num_top else (logprobs[:0], logprobs[:0])
    top = tuple((int(i), float(value)) for i, value in zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprobs(float(logprobs[token_id]), top)

"""From the wire's sampling fields to the engine's: what the gateway checks is what the workers run. Pure."""

from __future__ import annotations

from engine.sampling_params import SamplingParams
from services.protocol import Sampling


def engine_params(sampling: Sampling) -> SamplingParams:
    return SamplingParams(
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=sampling.logit_bias,
        seed=sampling.seed,
        choice=sampling.choice,
        stop_token_ids=tuple(sampling.stop_token_ids),
        logprobs=sampling.logprobs,
        bad_words=tuple(map(tuple, sampling.bad_words)),
        allowed_token_ids=tuple(sampling.allowed_token_ids),
        grammar=sampling.grammar,
        prompt_logprobs=sampling.prompt_logprobs,
    )

"""POST /v1/completions: a body to its plan. On a pool thread."""

from __future__ import annotations

from functools import partial

from services.gateway.errors import InvalidRequest
from services.gateway.openai.answers import CompletionAnswer
from services.gateway.openai.common import MAX_CHOICES, ServedModel, answer_options, text_options, truncated
from services.gateway.openai.prompts import Prompt, read_prompts
from services.gateway.openai.requests import CompletionRequest, parse_completion
from services.gateway.openai.sampling import fit_max_tokens, requested_tokens, to_sampling
from services.gateway.plan import Api, Plan, PromptPlan
from services.gateway.structured.grammars import constraint_grammar


class CompletionApi(Api):
    name = "completions"
    id_prefix = "cmpl"

    def __init__(self, model: ServedModel) -> None:
        self._model = model

    def plan(self, body: bytes, context: int) -> Plan:
        request = parse_completion(body)
        self._model.check_name(request.model)
        n = request.n or 1
        if request.best_of not in (None, n):
            raise InvalidRequest("best_of is not supported, but for the same as n", param="best_of")
        # Cheap checks come before the tokenizer.
        _, max_tokens = requested_tokens(request)
        text = text_options(request, no_output=max_tokens == 0)
        constraint = self._model.constraint(request)
        grammar = ""
        if constraint is not None:
            grammar = self._model.check_grammar(constraint_grammar(constraint), constraint.param)
        prompts = read_prompts(request.prompt, self._model.text.config.vocab_size)
        if len(prompts) * n > MAX_CHOICES:
            raise InvalidRequest(f"{len(prompts)} prompts with n = {n} are more than {MAX_CHOICES} choices", param="n")
        plans = [self._prompt_plan(request, prompt, context, grammar) for prompt in prompts]
        options = answer_options(request, plans, self._model)
        return Plan(
            plans,
            partial(CompletionAnswer, options),
            n=n,
            stream=bool(request.stream),
            text=text,
            cache_salt=request.cache_salt or "",
            priority=request.priority or 0,
        )

    def _prompt_plan(self, request: CompletionRequest, prompt: Prompt, context: int, grammar: str) -> PromptPlan:
        model, given = self._model, prompt
        if isinstance(prompt, str):
            special = request.add_special_tokens is not False
            limit = None if request.truncate_prompt_tokens else context
            encode = partial(model.text.text_prompt, prompt, limit, add_special_tokens=special)
            prompt = model.tokenized(context, "prompt", encode)
        token_ids = truncated(prompt, request)
        if not token_ids:
            raise InvalidRequest("prompt has no tokens", param="prompt")
        max_tokens = fit_max_tokens(request, len(token_ids), context)
        sampling = to_sampling(request, max_tokens, model.for_sampling(), grammar)
        if not request.echo:
            return PromptPlan(token_ids, sampling)
        echo = given if isinstance(given, str) else model.text.tokenizer.decode_all(token_ids)
        offsets = model.text.tokenizer.offsets(token_ids, echo) if sampling.prompt_logprobs is not None else ()
        return PromptPlan(token_ids, sampling, echo, offsets)

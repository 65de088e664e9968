"""What the planning of chat and completions has in common. On a pool thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from services.gateway.errors import ContextTooLong, InvalidRequest, NotFound
from services.gateway.openai.answers import AnswerOptions
from services.gateway.openai.requests import GenerationRequest
from services.gateway.openai.sampling import SamplingModel, num_logprobs, read_stops
from services.gateway.plan import PromptPlan, TextOptions
from services.gateway.structured.constraints import Constraint, read_constraint
from services.gateway.structured.grammars import GrammarCheck
from services.gateway.text.chat_template import TemplateError
from services.gateway.text.model_text import ModelText, TextTooLong

MAX_CHOICES = 128
T = TypeVar("T")


class ServedModel:
    """The model as the APIs see it."""

    def __init__(self, name: str, text: ModelText) -> None:
        self.name = name
        self.text = text
        self.check_grammar = GrammarCheck()

    def constraint(self, request: GenerationRequest) -> Constraint | None:
        """What the request says about the form of its output."""
        constraint = read_constraint(
            request.response_format,
            request.structured_outputs,
            guided_json=request.guided_json,
            guided_regex=request.guided_regex,
            guided_choice=request.guided_choice,
            guided_grammar=request.guided_grammar,
        )
        if constraint is not None:
            refuse_with_grammar(request)
        return constraint

    def check_name(self, name: str) -> None:
        if name != self.name:
            message = f"The model {name!r} does not exist; this is {self.name!r}"
            raise NotFound(message, param="model", code="model_not_found")

    def for_sampling(self) -> SamplingModel:
        text = self.text
        return SamplingModel(
            text.config.vocab_size,
            text.config.eos_token_ids,
            lambda words: text.tokenizer.encode(words, add_special_tokens=False),
            text.defaults,
        )

    def tokenized(self, context: int, param: str, tokenize: Callable[[], T]) -> T:
        """`tokenize()`, with what it may find wrong told to the client."""
        try:
            return tokenize()
        except TextTooLong as error:
            raise ContextTooLong(
                f"This model's maximum context length is {context} tokens, but the prompt has at least "
                f"{error.min_num_tokens}.",
                param=param,
            ) from None
        except TemplateError as error:
            raise InvalidRequest(f"the chat template refuses these messages: {error}", param=param) from None


def refuse_with_grammar(request: GenerationRequest) -> None:
    """What would keep an output from ending where its grammar does, or following it at all."""
    if request.ignore_eos:
        raise InvalidRequest("ignore_eos cannot be combined with structured output", param="ignore_eos")
    if request.allowed_token_ids is not None:
        message = "allowed_token_ids cannot be combined with structured output"
        raise InvalidRequest(message, param="allowed_token_ids")


def truncated(token_ids: list[int], request: GenerationRequest) -> list[int]:
    """The last `truncate_prompt_tokens` of them."""
    kept = request.truncate_prompt_tokens
    if kept is None:
        return token_ids
    return token_ids[-kept:]


def text_options(request: GenerationRequest, *, no_output: bool = False) -> TextOptions:
    return TextOptions(
        stops=read_stops(request.stop),
        include_stop=bool(request.include_stop_str_in_output),
        keep_special=request.skip_special_tokens is False,
        token_ids=bool(request.return_token_ids),
        no_output=no_output,
    )


def answer_options(request: GenerationRequest, prompts: list[PromptPlan], model: ServedModel) -> AnswerOptions:
    n = request.n or 1
    return AnswerOptions(
        model=request.model,
        num_choices=n * len(prompts),
        spell=model.text.tokenizer.spelling,
        include_usage=request.include_usage,
        scored=num_logprobs(request) is not None,
        tokens_as_ids=bool(request.return_tokens_as_token_ids),
        prompts=[prompt.token_ids for prompt in prompts] if request.return_token_ids else None,
        num_per_prompt=n,
        num_prompt_tokens=sum(len(prompt.token_ids) for prompt in prompts),
    )

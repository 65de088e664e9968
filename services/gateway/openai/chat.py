"""POST /v1/chat/completions: a body to its plan. On a pool thread.

The planner serves the other APIs that chat, too: they put what they are asked as a ChatRequest and answer in their
own words.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from services.gateway.errors import InvalidRequest
from services.gateway.json_body import validated
from services.gateway.openai.answers import AnswerOptions, ChatAnswer
from services.gateway.openai.common import ServedModel, answer_options, refuse_with_grammar, text_options, truncated
from services.gateway.openai.prompts import read_messages
from services.gateway.openai.requests import ChatRequest, parse_chat
from services.gateway.openai.sampling import fit_max_tokens, requested_tokens, to_sampling
from services.gateway.plan import Answer, AnswerHead, Api, Plan, PromptPlan
from services.gateway.structured.constraints import Constraint
from services.gateway.structured.grammars import Thought, calls_grammar, constraint_grammar
from services.gateway.text.model_text import ChatOptions, ChatPrompt
from services.gateway.tools.definitions import ToolUse, read_tool_use
from services.gateway.tools.formats import OutputFormat
from services.gateway.tools.reasoning import opens_thought

_OURS = frozenset({"messages", "tools", "add_generation_prompt"})
MakeAnswer = Callable[[AnswerHead], Answer]


class ChatPlanner:
    def __init__(self, model: ServedModel, output_format: OutputFormat) -> None:
        self.model = model
        self._format = output_format

    def plan(
        self, request: ChatRequest, context: int, answer: Callable[[AnswerOptions], MakeAnswer], param: str
    ) -> Plan:
        """`param`: the field that holds the prompt, for errors about all of it."""
        model = self.model
        model.check_name(request.model)
        # Cheap checks come before the tokenizer.
        requested_tokens(request)
        text = text_options(request)
        use = self._tool_use(request)
        constraint = model.constraint(request)
        if constraint is not None and use.mode == "required":
            raise InvalidRequest(f"{constraint.param} cannot be combined with this tool_choice", param="tool_choice")
        prompt = self._prompt(request, use, context, param)
        token_ids = truncated(prompt.token_ids, request)
        if not token_ids:
            raise InvalidRequest(f"{param} has no tokens", param=param)
        grammar = self._grammar(request, constraint, use, prompt)
        max_tokens = fit_max_tokens(request, len(token_ids), context)
        sampling = to_sampling(request, max_tokens, model.for_sampling(), grammar)
        plans = [PromptPlan(token_ids, sampling)]
        return Plan(
            plans,
            answer(answer_options(request, plans, model)),
            n=request.n or 1,
            stream=bool(request.stream),
            text=text,
            parser=lambda: self._format.parser(use.names, one_only=use.one_only, thinking=opens_thought(prompt.tail)),
            cache_salt=request.cache_salt or "",
            priority=request.priority or 0,
        )

    def tokenize(self, fields: dict[str, Any]) -> list[int]:
        """The prompt of a chat of these fields, however long."""
        request = validated(ChatRequest, fields)
        return self._prompt(request, self._tool_use(request), None, "messages").token_ids

    def _prompt(self, request: ChatRequest, use: ToolUse, context: int | None, param: str) -> ChatPrompt:
        messages = read_messages(request.messages)
        limit = None if request.truncate_prompt_tokens else context
        encode = partial(self.model.text.chat_prompt, messages, limit, _chat_options(request, use))
        return self.model.tokenized(context or 0, param, encode)

    def _tool_use(self, request: ChatRequest) -> ToolUse:
        use = read_tool_use(request.tools, request.tool_choice, request.parallel_tool_calls)
        template = self.model.text.template
        if use.tools and (template is None or not template.shows_tools or self._format.tools == "none"):
            raise InvalidRequest("the chat template of this model has no place for tools", param="tools")
        return use

    def _grammar(self, request: ChatRequest, constraint: Constraint | None, use: ToolUse, prompt: ChatPrompt) -> str:
        """Empty where the output may be anything."""
        thought: Thought = "none"
        if self._format.reasoning == "think":
            thought = "open" if opens_thought(prompt.tail) else "possible"
        if use.mode == "required":
            refuse_with_grammar(request)
            grammar = calls_grammar(use.tools, self._format.tools, one_only=use.one_only, thought=thought)
            return self.model.check_grammar(grammar, "tools")
        if constraint is None:
            return ""
        return self.model.check_grammar(constraint_grammar(constraint, thought), constraint.param)


class ChatApi(Api):
    name = "chat.completions"
    id_prefix = "chatcmpl"

    def __init__(self, planner: ChatPlanner) -> None:
        self._planner = planner

    def plan(self, body: bytes, context: int) -> Plan:
        return self._planner.plan(parse_chat(body), context, lambda options: partial(ChatAnswer, options), "messages")


def _chat_options(request: ChatRequest, use: ToolUse) -> ChatOptions:
    variables = dict(request.chat_template_kwargs or {})
    taken = sorted(_OURS & variables.keys())
    if taken:
        raise InvalidRequest(f"chat_template_kwargs may not set {taken[0]}", param="chat_template_kwargs")
    if request.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", request.reasoning_effort)
    continues = bool(request.continue_final_message)
    opens = not continues if request.add_generation_prompt is None else request.add_generation_prompt
    if continues and opens:
        raise InvalidRequest(
            "continue_final_message needs add_generation_prompt to be false", param="continue_final_message"
        )
    return ChatOptions(
        tools=use.definitions,
        variables=variables,
        add_generation_prompt=opens,
        continue_final_message=continues,
        add_special_tokens=bool(request.add_special_tokens),
    )

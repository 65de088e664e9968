"""The model's own Jinja chat template, in a sandbox.

Compiled at start-up; rendered on a pool thread. Templates come with the model and what they may do is bounded by
the sandbox: no attribute of Python's internals, no mutation, no range over 100,000.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = Mapping[str, Any]


class TemplateError(Exception):
    """The template cannot be compiled, or cannot render these messages; the text says why."""


class _Refused(jinja2.TemplateError):
    """What a template's raise_exception() raises."""


class _GenerationTag(Extension):
    """{% generation %}...{% endgeneration %} marks what the assistant wrote, for training; here it is its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """`special_tokens` are the names a template may use, such as bos_token, with their spelling."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], now: Callable[[], datetime] = datetime.now
    ) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        self._special_tokens = dict(special_tokens)
        self.source = source
        try:
            self._template = environment.from_string(source)
            variables = meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateError as error:
            raise TemplateError(f"the chat template does not compile: {error}") from error
        self.shows_tools = "tools" in variables
        self.shows_tool_calls = "tool_calls" in source

    def render(self, messages: Sequence[Message], **variables: Any) -> str:
        """The prompt, up to where the assistant begins to speak unless add_generation_prompt is false."""
        defaults = {"add_generation_prompt": True, "tools": None}
        try:
            return self._template.render({**self._special_tokens, **defaults, **variables, "messages": messages})
        except _Refused as error:
            raise TemplateError(str(error)) from error
        except Exception as error:  # whatever a template's expressions raise on messages it did not expect
            raise TemplateError(f"the chat template cannot render these messages: {error}") from error


def _raise_exception(message: str) -> None:
    raise _Refused(message)


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    # Not jinja2's own, which escapes HTML.
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)

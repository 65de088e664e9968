"""From a constraint, or a tool that must be called, to a grammar in llguidance's form. Pure, on pool threads.

The form is {"grammars": [...]}, the first one being the start; others are referred to by name. A model that thinks
may do so before what the grammar is about.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from engine import errors as engine_errors
from engine.grammar import check_grammar
from services.gateway.errors import InvalidRequest
from services.gateway.structured.constraints import Constraint
from services.gateway.tools.definitions import Tool
from services.gateway.tools.formats import ToolFormat

Thought = Literal["none", "open", "possible"]
"""Whether the output may begin with a thought, or begins inside one that the prompt has opened."""

WHITESPACE = r"[ \t\n\r]{0,32}"
"""Between the tokens of JSON: enough to indent, too little for a model to lose itself in."""
MAX_REMEMBERED = 256


def constraint_grammar(constraint: Constraint, thought: Thought = "none") -> str:
    return _encoded(_answer(constraint), thought)


def calls_grammar(tools: Sequence[Tool], form: ToolFormat, *, one_only: bool, thought: Thought = "none") -> str:
    """One call or more of these tools, as the model's own format writes them."""
    opening, key, closing, between = _CALL_PARTS[form]
    lines = ["start: call" if one_only else "start: call (between call)*", f"between: {between}"]
    lines.append(f"call: {_quoted(opening)} object {_quoted(closing)}" if opening else "call: object")
    lines.append("object: " + " | ".join(f"tool_{i}" for i in range(len(tools))))
    for i, tool in enumerate(tools):
        head = f'{{"name": {_json(tool.name)}, "{key}": '
        lines.append(f"tool_{i}: {_quoted(head)} arguments_{i} {_quoted('}')}")
        lines.append(f"arguments_{i}: %json {_json(_with_whitespace(tool.parameters))}")
    return _encoded({"lark_grammar": "\n".join(lines)}, thought)


_CALL_PARTS: dict[str, tuple[str, str, str, str]] = {
    "hermes": ("<tool_call>\n", "arguments", "\n</tool_call>", r'"\n"'),
    "llama3": ("", "parameters", "", '"; "'),
}
"""What opens a call, the key of its arguments, what closes it, what stands between two."""


def _answer(constraint: Constraint) -> dict[str, Any]:
    match constraint.kind:
        case "json":
            return {"json_schema": _with_whitespace(constraint.value)}
        case "choice":
            return {"lark_grammar": "start: " + " | ".join(map(_quoted, constraint.value))}
        case "regex":
            pattern = constraint.value.replace("/", r"\/")
            return {"lark_grammar": f"start: /{pattern}/"}
        case "grammar":
            return {"lark_grammar": constraint.value}


def _encoded(answer: dict[str, Any], thought: Thought) -> str:
    if thought == "none":
        return _json({"grammars": [answer]})
    lead = "thought" if thought == "open" else '("<think>" thought)?'
    lines = [f"start: {lead} space @answer", r"space: /\s{0,8}/", 'thought[suffix="</think>"]: /(?s:.*)/']
    return _json({"grammars": [{"lark_grammar": "\n".join(lines)}, {"name": "answer"} | answer]})


def _with_whitespace(schema: dict[str, Any]) -> dict[str, Any]:
    """A client's own x-guidance is its schema's, but not for limits of ours."""
    return schema | {"x-guidance": {"whitespace_pattern": WHITESPACE}}


def _quoted(text: str) -> str:
    """As a Lark string."""
    return _json(text)


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


class GrammarCheck:
    """Whether grammars can be used, remembered for the last ones. Any thread."""

    def __init__(self) -> None:
        self._good: OrderedDict[str, None] = OrderedDict()
        self._access = threading.Lock()

    def __call__(self, grammar: str, param: str) -> str:
        """The grammar. Raises InvalidRequest that names the client's field."""
        with self._access:
            if grammar in self._good:
                self._good.move_to_end(grammar)
                return grammar
        try:
            check_grammar(grammar)
        except engine_errors.InvalidRequest as error:
            raise InvalidRequest(str(error), param=param) from None
        with self._access:
            self._good[grammar] = None
            while len(self._good) > MAX_REMEMBERED:
                self._good.popitem(last=False)
        return grammar

"""Which tool-call and reasoning formats a model writes: told by flag, or by its chat template."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from services.gateway.plan import OutputParser
from services.gateway.tools.parsers import HermesParser, Llama3Parser, ToolParser
from services.gateway.tools.reasoning import CLOSE as THINK_CLOSE
from services.gateway.tools.reasoning import ReasoningParser

ToolFormat = Literal["hermes", "llama3", "none"]
ReasoningFormat = Literal["think", "none"]
_PARSERS: Mapping[str, type[ToolParser]] = {"hermes": HermesParser, "llama3": Llama3Parser}


@dataclass(frozen=True, slots=True)
class OutputFormat:
    tools: ToolFormat = "none"
    reasoning: ReasoningFormat = "none"

    @classmethod
    def of(
        cls, template: str, tools: ToolFormat | Literal["auto"], reasoning: ReasoningFormat | Literal["auto"]
    ) -> OutputFormat:
        """`template`: the source of the model's chat template."""
        return cls(
            tools=_tools_of(template) if tools == "auto" else tools,
            reasoning=("think" if THINK_CLOSE in template else "none") if reasoning == "auto" else reasoning,
        )

    def parser(self, names: Collection[str], *, one_only: bool, thinking: bool) -> OutputParser | None:
        """For one choice; None where its text is all content. `names`: of the tools it may call, if any."""
        inner = _PARSERS[self.tools](names, one_only=one_only) if names else None
        return ReasoningParser(inner, thinking=thinking) if self.reasoning == "think" else inner


def _tools_of(template: str) -> ToolFormat:
    if "<tool_call>" in template:
        return "hermes"
    if "<|python_tag|>" in template or ("ipython" in template and '"parameters"' in template):
        return "llama3"
    return "none"

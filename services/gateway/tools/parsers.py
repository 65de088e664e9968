"""Tool calls in the text of a model, by format. Pure; one object a choice.

hermes   <tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number, text before (Hermes, Qwen 2.5 and 3)
llama3   the whole output is {"name": ..., "parameters": {...}}, several after another or with ";" between (Llama 3)

What turns out not to be a call is text, to the last character. Space between calls belongs to nobody.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection

from services.gateway.output import Delta, ToolCallDelta
from services.gateway.text.stop_strings import possible_start
from services.gateway.tools.calls import CallReader, NewId, new_call_id

OPEN, CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"


class ToolParser(ABC):
    """`one_only`: nothing is read after the first call."""

    def __init__(self, names: Collection[str], *, one_only: bool = False, new_id: NewId = new_call_id) -> None:
        self._names = names
        self._one_only = one_only
        self._new_id = new_id
        self._held = ""
        self._call: CallReader | None = None
        self._num_started = 0
        self.num_tool_calls = 0
        """Complete ones."""

    @property
    def thinking(self) -> bool:
        return False

    @property
    def ended(self) -> bool:
        return self._one_only and self.num_tool_calls > 0

    def push(self, text: str) -> Delta:
        content: list[str] = []
        calls: list[ToolCallDelta] = []
        rest: str | None = self._held + text
        self._held = ""
        while rest and not self.ended:
            rest = self._in_call(self._call, rest, content, calls) if self._call else self._outside(rest, content)
        return Delta("".join(content), tool_calls=calls)

    def flush(self) -> Delta:
        held, self._held = self._held, ""
        if self._call is not None and not self._call.named:
            held = self._opening() + self._call.raw + held
        elif self.num_tool_calls or self._call is not None:
            held = held.strip()
        self._call = None
        return Delta(held)

    def _in_call(self, call: CallReader, text: str, content: list[str], calls: list[ToolCallDelta]) -> str:
        deltas, rest = call.push(text)
        calls += deltas
        if call.done:
            self.num_tool_calls += 1
            self._call = None
        elif call.failed:
            self._call = None
            if not call.named:
                content.append(self._opening() + call.raw)
                self._num_started -= 1
        return rest

    def _begin_call(self, names: Collection[str] | None) -> None:
        self._call = CallReader(self._num_started, names, self._new_id)
        self._num_started += 1

    @abstractmethod
    def _outside(self, text: str, content: list[str]) -> str:
        """Text outside a call: appends what is content, holds what is not known yet, may begin a call. Returns
        what is still to be read."""

    @abstractmethod
    def _opening(self) -> str:
        """What a call begins with, before its object."""


class HermesParser(ToolParser):
    def _outside(self, text: str, content: list[str]) -> str:
        if self._num_started:
            text = text.lstrip()
            if text.startswith(CLOSE):
                return text.removeprefix(CLOSE)
            if CLOSE.startswith(text):
                self._held = text
                return ""
        start = text.find(OPEN)
        if start >= 0:
            content.append(text[:start])
            self._begin_call(None)
            return text[start + len(OPEN) :]
        end = possible_start(text, OPEN)
        content.append(text[:end])
        self._held = text[end:]
        return ""

    def _opening(self) -> str:
        return OPEN


class Llama3Parser(ToolParser):
    def __init__(self, names: Collection[str], *, one_only: bool = False, new_id: NewId = new_call_id) -> None:
        super().__init__(names, one_only=one_only, new_id=new_id)
        self._plain = False
        """It is text from here on."""
        self._before = ""
        """What stood before the object and is not shown, if it is a call."""

    def _outside(self, text: str, content: list[str]) -> str:
        if self._plain:
            content.append(text)
            return ""
        between = " \t\r\n;" if self._num_started else " \t\r\n"
        stripped = text.lstrip(between)
        if stripped.startswith(PYTHON_TAG):
            stripped = stripped.removeprefix(PYTHON_TAG).lstrip()
        if not stripped or PYTHON_TAG.startswith(stripped):
            self._held = text
            return ""
        if stripped.startswith("{"):
            self._before = text[: len(text) - len(stripped)]
            self._begin_call(self._names)
            return stripped
        self._plain = True
        return text

    def _in_call(self, call: CallReader, text: str, content: list[str], calls: list[ToolCallDelta]) -> str:
        rest = super()._in_call(call, text, content, calls)
        self._plain = call.failed
        return rest

    def _opening(self) -> str:
        return self._before

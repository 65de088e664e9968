"""What a model thinks between <think> and </think>, apart from what it answers. Pure; one object a choice.

    START --<think>--> THINKING --</think>--> ANSWER
      '--anything else--> ANSWER
A prompt whose template has opened the thought already begins in THINKING. Line breaks at the seams are dropped.
"""

from __future__ import annotations

import enum

from services.gateway.output import Delta
from services.gateway.plan import OutputParser
from services.gateway.text.stop_strings import possible_start

OPEN, CLOSE = "<think>", "</think>"


def opens_thought(prompt_tail: str) -> bool:
    """Whether a rendered prompt ends inside a thought."""
    return prompt_tail.rstrip().endswith(OPEN)


class _State(enum.Enum):
    START = enum.auto()
    THINKING = enum.auto()
    ANSWER = enum.auto()


class ReasoningParser:
    """`inner` reads the answer, for tool calls."""

    def __init__(self, inner: OutputParser | None = None, *, thinking: bool = False) -> None:
        self._inner = inner
        self._state = _State.THINKING if thinking else _State.START
        self._held = ""
        self._at_seam = True
        """Nothing of this part has been shown: line breaks are not, either."""

    @property
    def num_tool_calls(self) -> int:
        return self._inner.num_tool_calls if self._inner is not None else 0

    @property
    def thinking(self) -> bool:
        return self._state is _State.THINKING

    @property
    def ended(self) -> bool:
        return self._inner is not None and self._inner.ended

    def push(self, text: str) -> Delta:
        text = self._held + text
        self._held = ""
        if self._state is _State.START:
            return self._start(text)
        return self._think(text) if self._state is _State.THINKING else self._answer(text)

    def flush(self) -> Delta:
        held, self._held = self._held, ""
        if self._state is _State.THINKING:
            return Delta(reasoning=held.rstrip("\n"))
        self._at_seam = self._at_seam and self._state is _State.ANSWER
        delta = self._answer(held)
        return delta.then(self._inner.flush()) if self._inner is not None else delta

    def _start(self, text: str) -> Delta:
        stripped = text.lstrip()
        if stripped.startswith(OPEN):
            self._state = _State.THINKING
            return self._think(stripped.removeprefix(OPEN))
        if OPEN.startswith(stripped):
            self._held = text
            return Delta()
        self._state, self._at_seam = _State.ANSWER, False
        return self._answer(text)

    def _think(self, text: str) -> Delta:
        if self._at_seam:
            text = text.lstrip("\n")
            self._at_seam = not text
        end = text.find(CLOSE)
        if end >= 0:
            self._state, self._at_seam = _State.ANSWER, True
            return Delta(reasoning=text[:end].rstrip("\n")).then(self._answer(text[end + len(CLOSE) :]))
        shown = len(text[: possible_start(text, CLOSE)].rstrip("\n"))
        self._held = text[shown:]
        return Delta(reasoning=text[:shown])

    def _answer(self, text: str) -> Delta:
        if self._at_seam:
            text = text.lstrip("\n")
            self._at_seam = not text
        if not text or self._inner is None:
            return Delta(text)
        return self._inner.push(text)

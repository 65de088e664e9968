"""Cuts a stream of text at the first stop string, without ever showing a part of one. Pure.

The first stop string is the one that is complete first, reading character by character, and of those that end
on the same character the longest. So the cut does not depend on how the text arrived.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Holds back the longest end of the text that may still become a stop string."""

    __slots__ = ("_held", "_keep", "_stops", "met")

    def __init__(self, stops: Sequence[str], *, keep: bool = False) -> None:
        """`keep`: the stop string itself is shown too."""
        self._stops = tuple(stops)
        self._keep = keep
        self._held = ""
        self.met: str | None = None
        """The stop string that was met."""

    def push(self, text: str) -> tuple[str, bool]:
        """Text to show, and whether a stop string was met. After that nothing more may be pushed."""
        if not self._stops:
            return text, False
        held = self._held + text
        cut = self._cut(held)
        if cut is not None:
            self._held = ""
            start, end = cut
            self.met = held[start:end]
            return held[: end if self._keep else start], True
        start = min(possible_start(held, stop) for stop in self._stops)
        self._held = held[start:]
        return held[:start], False

    def flush(self) -> str:
        """What was held back and is text after all."""
        held, self._held = self._held, ""
        return held

    def _cut(self, text: str) -> tuple[int, int] | None:
        """Where the first stop string begins and ends."""
        matches = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        return min(matches)[::-1] if matches else None


def possible_start(text: str, stop: str) -> int:
    """Where the longest end of `text` begins that `stop` begins with; len(text) where there is none."""
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while start >= 0:
        if stop.startswith(text[start:]):
            return start
        start = text.find(stop[0], start + 1)
    return len(text)

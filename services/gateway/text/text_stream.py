"""From the output tokens of one choice to its text: detokenizer, then stop strings. Pure.

Streaming and not, the text of an answer is what this returned, joined: the two cannot differ.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from services.gateway.text.detokenizer import Detokenizer
from services.gateway.text.stop_strings import StopStrings


class TextStream:
    """Feed tokens in order until `stopped`.

    `stop_token_ids` end the output on the worker's side; their text is not part of it, but they count as output
    tokens. Stop strings are looked for in the text of tokens after the first `min_tokens`.
    """

    __slots__ = ("_detokenizer", "_min_tokens", "_stop_token_ids", "_stops", "num_chars", "num_tokens", "stopped")

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: Sequence[str] = (),
        stop_token_ids: Collection[int] = (),
        min_tokens: int = 0,
        *,
        include_stop: bool = False,
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops, keep=include_stop)
        self._stop_token_ids = frozenset(stop_token_ids)
        self._min_tokens = min_tokens
        self.num_tokens = 0
        self.num_chars = 0
        """Characters so far, those that are held back included."""
        self.stopped = False
        """A stop string was met: the answer is complete whatever else the worker would make."""

    @property
    def stop(self) -> str | None:
        """The stop string that was met."""
        return self._stops.met

    def push(self, token_id: int) -> str:
        assert not self.stopped, "the text has ended"
        self.num_tokens += 1
        if token_id in self._stop_token_ids:
            return ""
        text = self._detokenizer.push(token_id)
        self.num_chars += len(text)
        if self.num_tokens <= self._min_tokens or not text:
            return text
        text, self.stopped = self._stops.push(text)
        return text

    def flush(self) -> str:
        """The rest, once the worker has finished. Nothing after a stop string."""
        if self.stopped:
            return ""
        text, self.stopped = self._stops.push(self._detokenizer.flush())
        return text if self.stopped else text + self._stops.flush()

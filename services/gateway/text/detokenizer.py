"""Token ids to text, one token at a time, so that any grouping of the same ids gives the same text. Pure.

One object a choice of a request, on the event loop. Nothing that was returned is ever taken back; a character
whose bytes are not all there is held. A character that the output ends inside of is dropped: the answer has whole
characters only.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")
_REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    def push(self, token_id: int) -> str:
        """The text that this token completes, often one word, possibly nothing."""

    def flush(self) -> str:
        """The text that was held only because more might have come. Called once, at the end."""


class ByteLevelDetokenizer:
    """Exact for byte-level vocabularies: `bytes_of[id]` is what the token stands for, b"" for special ones."""

    __slots__ = ("_bytes_of", "_decode")

    def __init__(self, bytes_of: Sequence[bytes]) -> None:
        self._bytes_of = bytes_of
        self._decode = _Utf8Decoder("replace").decode

    def push(self, token_id: int) -> str:
        # An id past the vocabulary (a padded embedding has such rows) spells nothing.
        return self._decode(self._bytes_of[token_id]) if token_id < len(self._bytes_of) else ""

    def flush(self) -> str:
        return ""


class WindowDetokenizer:
    """For every other decoder: decodes a short window twice and takes the difference.

    The window starts at a token whose text was complete, so that rules about the start of a text (a stripped
    space) act on old text only. From Hugging Face's text-generation-inference.

    `context` are the last tokens of the prompt: the first output token decodes as it does after them.
    """

    MAX_WINDOW_TOKENS = 32
    """A token can be held back by those before it only while a character is split; no character has as many."""

    def __init__(
        self, decode: Callable[[list[int]], str], is_special: Callable[[int], bool], context: Sequence[int] = ()
    ) -> None:
        self._decode = decode
        self._is_special = is_special
        self._window = [token_id for token_id in context if not is_special(token_id)]
        self._num_read = len(self._window)
        """Leading tokens of the window whose text has been returned."""

    def push(self, token_id: int) -> str:
        if self._is_special(token_id):
            return ""
        self._window.append(token_id)
        text, new = self._difference()
        incomplete = not new or text.endswith(_REPLACEMENT)
        if incomplete and len(self._window) - self._num_read < self.MAX_WINDOW_TOKENS:
            return ""
        self._window = self._window[self._num_read :]
        self._num_read = len(self._window)
        return new

    def flush(self) -> str:
        return self._difference()[1].rstrip(_REPLACEMENT)

    def _difference(self) -> tuple[str, str]:
        text = self._decode(self._window)
        return text, text[len(self._decode(self._window[: self._num_read])) :]

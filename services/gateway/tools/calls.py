"""One tool call out of a JSON object with a name and arguments, streamed as soon as the name is known. Pure."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Collection

from services.gateway.output import ToolCallDelta
from services.gateway.tools.json_members import ObjectScanner, Piece

ARGUMENT_KEYS = ("arguments", "parameters")
"""Hermes and Qwen write the first, Llama 3 the second."""
NewId = Callable[[], str]


def new_call_id() -> str:
    return "call_" + secrets.token_hex(12)


class CallReader:
    """Feed the text of one object. `names`: those a call may have; None allows any."""

    def __init__(self, index: int, names: Collection[str] | None, new_id: NewId) -> None:
        self._index = index
        self._names = names
        self._new_id = new_id
        self._scanner = ObjectScanner()
        self._name_text = ""
        self._waiting = ""
        """Arguments that may not go out yet: the name is not known, or they are written as a string."""
        self._quoted = False
        self._has_arguments = False
        self._refused = False
        self.raw = ""
        """All text so far, for when it is no call after all."""
        self.named = False
        """The call has begun for the client."""

    @property
    def done(self) -> bool:
        return self._scanner.done and self.named

    @property
    def failed(self) -> bool:
        """It is no call, or no JSON from here on."""
        return self._refused or self._scanner.broken or (self._scanner.done and not self.named)

    def push(self, text: str) -> tuple[list[ToolCallDelta], str]:
        """What it adds to the call, and the text after the object."""
        pieces, rest = self._scanner.push(text)
        self.raw += text[: len(text) - len(rest)]
        deltas: list[ToolCallDelta] = []
        for piece in pieces:
            if piece.key == "name" and not self.named:
                self._read_name(piece, deltas)
            elif piece.key in ARGUMENT_KEYS:
                self._read_arguments(piece, deltas)
        if self.done and not self._has_arguments:
            deltas.append(ToolCallDelta(self._index, "{}"))
        return deltas, rest

    def _read_name(self, piece: Piece, deltas: list[ToolCallDelta]) -> None:
        self._name_text += piece.text
        if not piece.ends:
            return
        name = _loads(self._name_text)
        if not isinstance(name, str) or not name or (self._names is not None and name not in self._names):
            self._refused = True
            return
        self.named = True
        deltas.append(ToolCallDelta(self._index, "", self._new_id(), name))
        if self._waiting and not self._quoted:
            deltas.append(ToolCallDelta(self._index, self._waiting))
            self._waiting = ""

    def _read_arguments(self, piece: Piece, deltas: list[ToolCallDelta]) -> None:
        if not self._has_arguments and piece.text.startswith('"'):
            self._quoted = True
        self._has_arguments = True
        self._waiting += piece.text
        if self._quoted and piece.ends:
            # Written as a string that holds JSON: what the client is to get is the JSON.
            unquoted = _loads(self._waiting)
            self._waiting = unquoted if isinstance(unquoted, str) else self._waiting
            self._quoted = False
        if self.named and not self._quoted and self._waiting:
            deltas.append(ToolCallDelta(self._index, self._waiting))
            self._waiting = ""


def _loads(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return None

"""The members of a JSON object that arrives in pieces. Pure.

Only the outermost level is understood: where a member's value begins and ends. The value itself is passed on as it
is written, so that it can be streamed before it is complete, and is not checked.

    BEFORE --{--> KEY --"--> IN_KEY --"--> COLON --:--> VALUE --> IN_VALUE --> AFTER --,--> KEY
                   '--}--> DONE                                                 '--}--> DONE
    anything else --> BROKEN
"""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass

_SPACE = " \t\r\n"


class _State(enum.Enum):
    BEFORE = enum.auto()
    KEY = enum.auto()
    IN_KEY = enum.auto()
    COLON = enum.auto()
    VALUE = enum.auto()
    IN_VALUE = enum.auto()
    AFTER = enum.auto()
    DONE = enum.auto()
    BROKEN = enum.auto()


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of one member's value."""

    key: str
    text: str
    ends: bool


class ObjectScanner:
    def __init__(self) -> None:
        self._state = _State.BEFORE
        self._key = ""
        self._depth = 0
        self._in_string = False
        self._escaped = False

    @property
    def done(self) -> bool:
        return self._state is _State.DONE

    @property
    def broken(self) -> bool:
        """It is no JSON object. Nothing more may be pushed."""
        return self._state is _State.BROKEN

    def push(self, text: str) -> tuple[list[Piece], str]:
        """What the text adds to members, and the part of it that comes after the object."""
        pieces: list[Piece] = []
        position = 0
        while position < len(text) and not (self.done or self.broken):
            if self._state is _State.IN_VALUE:
                position = self._value(text, position, pieces)
            else:
                position += self._step(text[position])
        return pieces, text[position:]

    def _step(self, char: str) -> int:
        """One character outside a value; returns 0 where it belongs to the value that it begins."""
        state = self._state
        if state is _State.IN_KEY:
            self._key += char
            if self._ends_string(char):
                self._key_ended()
        elif char in _SPACE:
            pass
        elif state is _State.BEFORE and char == "{":
            self._state = _State.KEY
        elif state is _State.KEY and char == '"':
            self._state, self._key = _State.IN_KEY, char
        elif state is _State.COLON and char == ":":
            self._state = _State.VALUE
        elif state is _State.VALUE:
            self._state, self._depth, self._in_string = _State.IN_VALUE, 0, False
            return 0
        elif state in (_State.AFTER, _State.KEY) and char == "}":
            self._state = _State.DONE
        elif state is _State.AFTER and char == ",":
            self._state = _State.KEY
        else:
            self._state = _State.BROKEN
        return 1

    def _key_ended(self) -> None:
        try:
            self._key = json.loads(self._key)
            self._state = _State.COLON
        except ValueError:
            self._state = _State.BROKEN

    def _value(self, text: str, start: int, pieces: list[Piece]) -> int:
        """Reads on in a value; returns the position after what was read of it."""
        for position in range(start, len(text)):
            char = text[position]
            if self._in_string:
                if self._ends_string(char):
                    self._in_string = False
                    if not self._depth:
                        return self._value_ended(text, start, position + 1, pieces)
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif self._depth:
                self._depth -= char in "}]"
                if not self._depth:
                    return self._value_ended(text, start, position + 1, pieces)
            elif char in ",}" or char in _SPACE:
                # A number or a literal has no end mark of its own.
                return self._value_ended(text, start, position, pieces)
        pieces.append(Piece(self._key, text[start:], ends=False))
        return len(text)

    def _value_ended(self, text: str, start: int, end: int, pieces: list[Piece]) -> int:
        pieces.append(Piece(self._key, text[start:end], ends=True))
        self._state = _State.AFTER
        return end

    def _ends_string(self, char: str) -> bool:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        else:
            return char == '"'
        return False

"""The model's tokenizer: text to ids and back. The only importer of `tokenizers`.

Loaded once; afterwards every method may be called from any thread.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as HfTokenizer

from services.gateway.text.byte_level import token_bytes
from services.gateway.text.detokenizer import ByteLevelDetokenizer, Detokenizer, WindowDetokenizer

CONTEXT_TOKENS = 8
"""Prompt tokens a detokenizer looks back on: the first output token decodes as it does after them."""
_NORMALIZED_SHRINK = {None: 1, "NFC": 4}
"""By how much a normalizer can shorten a text in bytes, for those where that is known."""


class TokenizerError(Exception):
    """The model directory holds no usable tokenizer; the text names the file."""


class Tokenizer:
    """`special_spelling` finds the special tokens spelled out in a text."""

    def __init__(self, definition: str) -> None:
        try:
            self._tokenizer = HfTokenizer.from_str(definition)
            self._literal = HfTokenizer.from_str(definition)
        except Exception as error:  # the library raises bare Exception
            raise TokenizerError(str(error)) from error
        self._literal.encode_special_tokens = True
        added = self._tokenizer.get_added_tokens_decoder()
        self._special_id_of = {token.content: token_id for token_id, token in added.items() if token.special}
        self._special_ids = frozenset(self._special_id_of.values())
        self.vocab_size: int = max(self._tokenizer.get_vocab().values()) + 1
        parts = json.loads(definition)
        self._bytes_of = self._byte_table() if _is_byte_level(parts.get("decoder")) else None
        self._max_token_bytes = self._longest_token_bytes(
            parts, strips=any(t.lstrip or t.rstrip for t in added.values())
        )
        longest_first = sorted(self._special_id_of, key=len, reverse=True)
        self.special_spelling = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    @classmethod
    def load(cls, directory: Path) -> Tokenizer:
        path = directory / "tokenizer.json"
        try:
            return cls(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, TokenizerError) as error:
            raise TokenizerError(f"cannot load {path}: {error}") from error

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Special tokens spelled out in `text` become the tokens they name."""
        # The batch call, because it alone lets go of the interpreter lock while it works.
        return _ids(self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens))

    def encode_literally(self, text: str) -> list[int]:
        """Special tokens spelled out in `text` are tokenised as the characters they are."""
        return _ids(self._literal.encode_batch_fast([text], add_special_tokens=False))

    def token_id(self, spelling: str) -> int | None:
        """The id of a vocabulary entry, special or not."""
        found: int | None = self._tokenizer.token_to_id(spelling)
        return found

    def special_id(self, spelling: str) -> int:
        return self._special_id_of[spelling]

    def min_num_tokens(self, num_bytes: int) -> int:
        """A lower bound on the tokens of a text of so many UTF-8 bytes; 0 where the tokenizer allows none."""
        return -(-num_bytes // self._max_token_bytes) if self._max_token_bytes else 0

    def detokenizer(self, prompt_token_ids: Sequence[int] = (), *, keep_special: bool = False) -> Detokenizer:
        """`keep_special`: special tokens are spelled out."""
        if self._bytes_of is not None:
            return ByteLevelDetokenizer(self._spelled_bytes if keep_special else self._bytes_of)
        context = prompt_token_ids[-CONTEXT_TOKENS:]
        if keep_special:
            return WindowDetokenizer(self.decode_all, lambda _: False, context=context)
        return WindowDetokenizer(self.decode, self._special_ids.__contains__, context=context)

    def decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        return text

    def decode_all(self, token_ids: list[int]) -> str:
        """With special tokens spelled out."""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        return text

    def offsets(self, token_ids: Sequence[int], text: str) -> list[int]:
        """Where each token begins in `text`, which they spell, with or without the special ones."""
        keep = len(text) == len(self.decode_all(list(token_ids)))
        detokenizer = self.detokenizer(keep_special=keep)
        found, num_chars = [], 0
        for token_id in token_ids:
            found.append(num_chars)
            num_chars += len(detokenizer.push(token_id))
        return found

    @cached_property
    def _spelled_bytes(self) -> list[bytes]:
        return [self.spelling(token_id) for token_id in range(self.vocab_size)]

    def spelling(self, token_id: int) -> bytes:
        """The bytes of one token by itself, special ones spelled out: what log probabilities are listed under."""
        if self._bytes_of is not None and token_id < len(self._bytes_of) and token_id not in self._special_ids:
            return self._bytes_of[token_id]
        if token_id in self._special_ids:
            return (self._tokenizer.id_to_token(token_id) or "").encode()
        return self.decode([token_id]).encode() if token_id < self.vocab_size else b""

    def _byte_table(self) -> list[bytes]:
        table = [b""] * self.vocab_size
        for token, token_id in self._tokenizer.get_vocab().items():
            if token_id not in self._special_ids:
                table[token_id] = token_bytes(token)
        return table

    def _longest_token_bytes(self, parts: dict[str, Any], *, strips: bool) -> int:
        """Bytes of text that one token can stand for at most; 0 where there is no such bound: a normalizer that
        drops text, an unknown-token that swallows any length, an added token that eats the spaces around it."""
        shrink = _NORMALIZED_SHRINK.get((parts.get("normalizer") or {}).get("type"))
        if self._bytes_of is None or shrink is None or strips:
            return 0
        added = max(map(len, (spelling.encode() for spelling in self._special_id_of)), default=1)
        return shrink * max(added, *map(len, self._bytes_of))


def _ids(encodings: Sequence[Any]) -> list[int]:
    ids: list[int] = encodings[0].ids
    return ids


def _is_byte_level(decoder: dict[str, Any] | None) -> bool:
    if decoder is None:
        return False
    if decoder.get("type") == "Sequence":
        inner = decoder.get("decoders") or []
        return len(inner) == 1 and _is_byte_level(inner[0])
    return decoder.get("type") == "ByteLevel"

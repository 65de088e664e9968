"""Rebuild a byte-level BPE tokenizer from the tables of a GGUF file. Used by gguf_import only.

GGUF names the pre-tokenizer (`tokenizer.ggml.pre`) instead of describing it; the few that are known here are built
as the models' own tokenizer.json has them, any other is refused: a wrong split gives different ids in silence.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, processors
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Split
from tokenizers.pre_tokenizers import Sequence as PreSequence

from engine.errors import ConfigError

# llama.cpp's token types.
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


def _split_then_bytes(pattern: str) -> PreTokenizer:
    return PreSequence([Split(Regex(pattern), behavior="isolated"), ByteLevel(add_prefix_space=False, use_regex=False)])


def _digits_then_bytes() -> PreTokenizer:
    return PreSequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])


_PRE_TOKENIZERS: dict[str, Callable[[], PreTokenizer]] = {
    "smollm": _digits_then_bytes,
    "gpt-2": lambda: ByteLevel(add_prefix_space=False),
    "llama-bpe": lambda: _split_then_bytes(_LLAMA3_SPLIT),
    "qwen2": lambda: _split_then_bytes(_QWEN2_SPLIT),
}


@dataclass(frozen=True, slots=True)
class TokenizerFields:
    """The `tokenizer.*` part of a GGUF file."""

    source: str
    """For error messages."""
    pre: str
    tokens: Sequence[str]
    token_types: Sequence[int]
    merges: Sequence[str]
    """Two tokens with a space between, most frequent first."""
    bos_token_id: int | None
    eos_token_id: int | None
    unk_token_id: int | None
    pad_token_id: int | None
    add_bos_token: bool | None
    """None: as the pre-tokenizer's family does."""
    add_prefix_space: bool
    chat_template: str | None

    def token(self, token_id: int | None) -> str | None:
        return None if token_id is None else self.tokens[token_id]


def write_tokenizer(directory: Path, fields: TokenizerFields, model_max_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json. Raises ConfigError naming the key at fault."""
    _check(fields)
    add_bos = fields.pre == "llama-bpe" if fields.add_bos_token is None else bool(fields.add_bos_token)
    _build(fields, add_bos).save(str(directory / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": add_bos,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": model_max_length,
        "bos_token": fields.token(fields.bos_token_id),
        "eos_token": fields.token(fields.eos_token_id),
        "unk_token": fields.token(fields.unk_token_id),
        "pad_token": fields.token(fields.pad_token_id),
        "added_tokens_decoder": {
            str(token_id): {
                "content": token.content,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": token.special,
            }
            for token_id, token in _added_tokens(fields)
        },
        "chat_template": fields.chat_template,
    }
    present = {key: value for key, value in config.items() if value is not None}
    text = json.dumps(present, indent=2, ensure_ascii=False) + "\n"
    (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")


def _check(fields: TokenizerFields) -> None:
    if fields.pre not in _PRE_TOKENIZERS:
        known = ", ".join(sorted(_PRE_TOKENIZERS))
        raise ConfigError(f"{fields.source}: tokenizer.ggml.pre = {fields.pre!r}, supported are {known}")
    if fields.add_prefix_space:
        raise ConfigError(f"{fields.source}: tokenizer.ggml.add_space_prefix = True is not supported")
    if len(fields.tokens) != len(fields.token_types):
        raise ConfigError(f"{fields.source}: tokenizer.ggml.tokens and tokenizer.ggml.token_type differ in length")
    if len(set(fields.tokens)) != len(fields.tokens):
        raise ConfigError(f"{fields.source}: tokenizer.ggml.tokens holds a token twice")
    for name in ("bos", "eos", "unk", "pad"):
        token_id = getattr(fields, f"{name}_token_id")
        if token_id is not None and not 0 <= token_id < len(fields.tokens):
            raise ConfigError(f"{fields.source}: the {name} token id {token_id} is outside the vocabulary")


def _build(fields: TokenizerFields, add_bos: bool) -> Tokenizer:
    vocab = {token: token_id for token_id, token in enumerate(fields.tokens)}
    merges = [_merge(fields, merge) for merge in fields.merges]
    # Llama 3 has tokens that no sequence of merges reaches; its tokenizer takes whole words first.
    try:
        model = BPE(vocab=vocab, merges=merges, ignore_merges=fields.pre == "llama-bpe")
    except Exception as error:  # tokenizers raises nothing narrower
        raise ConfigError(f"{fields.source}: tokenizer.ggml.merges do not fit the tokens: {error}") from error
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[fields.pre]()
    tokenizer.decoder = decoders.ByteLevel()
    if fields.pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    added = _added_tokens(fields)
    tokenizer.add_special_tokens([token for _, token in added if token.special])
    tokenizer.add_tokens([token for _, token in added if not token.special])
    bos = fields.token(fields.bos_token_id)
    if add_bos:
        if bos is None:
            raise ConfigError(f"{fields.source}: tokenizer.ggml.add_bos_token is set without a bos token")
        tokenizer.post_processor = processors.Sequence(
            [
                processors.ByteLevel(trim_offsets=False),
                processors.TemplateProcessing(
                    single=f"{bos} $A",
                    pair=f"{bos} $A {bos} $B",
                    special_tokens=[(bos, fields.bos_token_id)],
                ),
            ]
        )
    return tokenizer


def _merge(fields: TokenizerFields, merge: str) -> tuple[str, str]:
    left, separator, right = merge.partition(" ")
    if not (left and separator and right):
        raise ConfigError(f"{fields.source}: tokenizer.ggml.merges holds {merge!r}, which is no pair")
    return left, right


def _added_tokens(fields: TokenizerFields) -> list[tuple[int, AddedToken]]:
    """Tokens that are matched whole in text, before the pre-tokenizer sees it."""
    return [
        (token_id, AddedToken(token, special=kind != _USER_DEFINED, normalized=False))
        for token_id, (token, kind) in enumerate(zip(fields.tokens, fields.token_types, strict=True))
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]

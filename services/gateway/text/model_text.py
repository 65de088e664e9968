"""A model directory's text side in one object: prompts in, detokenizers out.

Built once at start-up, off the event loop; `chat_prompt` and `text_prompt` run on pool threads.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.model_config import ModelConfig, load_model_config
from services.gateway.text.chat_template import ChatTemplate, Message, TemplateError
from services.gateway.text.tokenizer import Tokenizer, TokenizerError

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class TextTooLong(Exception):
    """The text cannot fit `max_tokens` tokens; found out without tokenising it."""

    def __init__(self, min_num_tokens: int, max_tokens: int) -> None:
        super().__init__(f"at least {min_num_tokens} tokens, limit {max_tokens}")
        self.min_num_tokens = min_num_tokens
        self.max_tokens = max_tokens


class ModelText:
    """`template` is None for a model that has none: it completes, but does not chat."""

    def __init__(self, config: ModelConfig, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.template = template

    @classmethod
    def load(cls, directory: Path) -> ModelText:
        """Raises engine.errors.ConfigError, TokenizerError or TemplateError, each naming what is wrong."""
        config = load_model_config(directory)
        tokenizer = Tokenizer.load(directory)
        return cls(config, tokenizer, _load_template(directory))

    def text_prompt(self, text: str, max_tokens: int) -> list[int]:
        """Special tokens as the tokenizer adds them by default; those spelled out in the text are those tokens."""
        self._refuse_hopeless(text, max_tokens)
        return self.tokenizer.encode(text, add_special_tokens=True)

    def chat_prompt(self, messages: Sequence[Message], max_tokens: int) -> list[int]:
        """The rendered template, with nothing added: a template that wants a BOS writes it.

        A special token spelled out in a message is text, so no client can close its turn and open another's.
        Raises TemplateError, TextTooLong.
        """
        if self.template is None:
            raise TemplateError("this model has no chat template")
        disguise = _Disguise(self.tokenizer.special_spelling)
        rendered = self.template.render([disguise.put_on(message) for message in messages])
        self._refuse_hopeless(rendered, max_tokens)
        if not disguise.used:
            return self.tokenizer.encode(rendered, add_special_tokens=False)
        return self._encode_pieces(rendered, disguise)

    def _encode_pieces(self, rendered: str, disguise: _Disguise) -> list[int]:
        """What is spelled out now comes from the template and is a token; what is disguised is text."""
        ids: list[int] = []
        start = 0
        for match in self.tokenizer.special_spelling.finditer(rendered):
            ids += self.tokenizer.encode_literally(disguise.take_off(rendered[start : match.start()]))
            ids.append(self.tokenizer.special_id(match.group()))
            start = match.end()
        return ids + self.tokenizer.encode_literally(disguise.take_off(rendered[start:]))

    def _refuse_hopeless(self, text: str, max_tokens: int) -> None:
        num_tokens = self.tokenizer.min_num_tokens(len(text.encode()))
        if num_tokens > max_tokens:
            raise TextTooLong(num_tokens, max_tokens)


class _Disguise:
    """Replaces special tokens spelled out in messages by names that nobody can guess, and back."""

    def __init__(self, spelling: re.Pattern[str]) -> None:
        self._spelling = spelling
        self._nonce = secrets.token_hex(8)
        self._spelled: list[str] = []

    @property
    def used(self) -> bool:
        return bool(self._spelled)

    def put_on(self, message: Message) -> Message:
        return {key: self._hidden(value) for key, value in message.items()}

    def take_off(self, text: str) -> str:
        if self._nonce not in text:
            return text
        return re.sub(f"\ue000{self._nonce}:(\\d+)\ue001", lambda match: self._spelled[int(match[1])], text)

    def _hidden(self, value: Any) -> Any:
        return self._spelling.sub(self._name, value) if isinstance(value, str) else value

    def _name(self, match: re.Match[str]) -> str:
        self._spelled.append(match.group())
        return f"\ue000{self._nonce}:{len(self._spelled) - 1}\ue001"


def _load_template(directory: Path) -> ChatTemplate | None:
    """chat_template.jinja, or the template in tokenizer_config.json; of several named ones the default."""
    path = directory / "tokenizer_config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        beside = directory / "chat_template.jinja"
        source = beside.read_text(encoding="utf-8") if beside.exists() else config.get("chat_template")
    except (OSError, ValueError) as error:
        raise TokenizerError(f"cannot read {path}: {error}") from error
    if isinstance(source, list):
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    return None if source is None else ChatTemplate(source, _special_tokens(config))


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Spelling by name; the file has either the spelling or an object with it."""
    found = {}
    for name in _SPECIAL_NAMES:
        value = config.get(name)
        spelling = value.get("content") if isinstance(value, dict) else value
        if isinstance(spelling, str):
            found[name] = spelling
    return found

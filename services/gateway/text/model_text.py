"""A model directory's text side in one object: prompts in, detokenizers out.

Built once at start-up, off the event loop; `chat_prompt` and `text_prompt` run on pool threads.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.model_config import ModelConfig, load_model_config
from services.gateway.text.chat_template import ChatTemplate, Message, TemplateError
from services.gateway.text.generation_defaults import GenerationDefaults
from services.gateway.text.tokenizer import Tokenizer, TokenizerError

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


TAIL_CHARS = 64


@dataclass(frozen=True, slots=True)
class ChatOptions:
    tools: list[dict[str, Any]] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    """More variables for the template, such as enable_thinking."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    """The last message is left open, for the model to go on with."""
    add_special_tokens: bool = False


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    token_ids: list[int]
    tail: str
    """The last characters of the rendered template: whether the assistant's turn has been opened with a thought."""


class TextTooLong(Exception):
    """The text cannot fit `max_tokens` tokens; found out without tokenising it."""

    def __init__(self, min_num_tokens: int, max_tokens: int) -> None:
        super().__init__(f"at least {min_num_tokens} tokens, limit {max_tokens}")
        self.min_num_tokens = min_num_tokens
        self.max_tokens = max_tokens


class ModelText:
    """`template` is None for a model that has none: it completes, but does not chat."""

    def __init__(
        self,
        config: ModelConfig,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        defaults: GenerationDefaults | None = None,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.template = template
        self.defaults = defaults or GenerationDefaults()

    @classmethod
    def load(cls, directory: Path, template: Path | None = None, *, use_defaults: bool = True) -> ModelText:
        """`template`: a file to use in place of the model's own. Raises engine.errors.ConfigError, TokenizerError
        or TemplateError, each naming what is wrong."""
        config = load_model_config(directory)
        tokenizer = Tokenizer.load(directory)
        defaults = GenerationDefaults.load(directory) if use_defaults else None
        return cls(config, tokenizer, _load_template(directory, template), defaults)

    def text_prompt(self, text: str, max_tokens: int | None, *, add_special_tokens: bool = True) -> list[int]:
        """Special tokens as the tokenizer adds them by default; those spelled out in the text are those tokens.
        Raises TextTooLong; None for `max_tokens` allows any length."""
        self._refuse_hopeless(text, max_tokens)
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def chat_prompt(
        self,
        messages: Sequence[Message],
        max_tokens: int | None,
        options: ChatOptions | None = None,
    ) -> ChatPrompt:
        """The rendered template, with nothing added: a template that wants a BOS writes it.

        A special token spelled out in a message is text, so no client can close its turn and open another's.
        Raises TemplateError, TextTooLong.
        """
        options = options or ChatOptions()
        if self.template is None:
            raise TemplateError("this model has no chat template")
        if not self.template.shows_tool_calls and any(message.get("tool_calls") for message in messages):
            raise TemplateError("it has no place for the tool calls of a message")
        disguise = _Disguise(self.tokenizer.special_spelling)
        disguised = [disguise.put_on(message) for message in messages]
        rendered = self.template.render(
            disguised,
            **disguise.put_on(options.variables),
            tools=disguise.put_on(options.tools),
            add_generation_prompt=options.add_generation_prompt,
        )
        if options.continue_final_message:
            rendered = _cut_after(rendered, disguised[-1]["content"])
        self._refuse_hopeless(rendered, max_tokens)
        if not disguise.used:
            ids = self.tokenizer.encode(rendered, add_special_tokens=options.add_special_tokens)
        else:
            ids = self._encode_pieces(rendered, disguise)
        return ChatPrompt(ids, rendered[-TAIL_CHARS:])

    def _encode_pieces(self, rendered: str, disguise: _Disguise) -> list[int]:
        """What is spelled out now comes from the template and is a token; what is disguised is text."""
        ids: list[int] = []
        start = 0
        for match in self.tokenizer.special_spelling.finditer(rendered):
            ids += self.tokenizer.encode_literally(disguise.take_off(rendered[start : match.start()]))
            ids.append(self.tokenizer.special_id(match.group()))
            start = match.end()
        return ids + self.tokenizer.encode_literally(disguise.take_off(rendered[start:]))

    def _refuse_hopeless(self, text: str, max_tokens: int | None) -> None:
        if max_tokens is None:
            return
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

    def put_on(self, value: Any) -> Any:
        """A copy of a message, or of any JSON value, in which no string spells a special token."""
        if isinstance(value, str):
            return self._spelling.sub(self._name, value)
        if isinstance(value, list):
            return [self.put_on(item) for item in value]
        if isinstance(value, Mapping):
            return {self.put_on(key): self.put_on(item) for key, item in value.items()}
        return value

    def take_off(self, text: str) -> str:
        if self._nonce not in text:
            return text
        return re.sub(f"\ue000{self._nonce}:(\\d+)\ue001", lambda match: self._spelled[int(match[1])], text)

    def _name(self, match: re.Match[str]) -> str:
        self._spelled.append(match.group())
        return f"\ue000{self._nonce}:{len(self._spelled) - 1}\ue001"


def _cut_after(rendered: str, content: str) -> str:
    """Up to the end of the last message, without what the template writes after one."""
    end = rendered.rfind(content.strip())
    if end < 0 or not content.strip():
        raise TemplateError("the final message cannot be continued: the template does not show it as it is")
    return rendered[: end + len(content.strip())]


def _load_template(directory: Path, instead: Path | None) -> ChatTemplate | None:
    """chat_template.jinja, or the template in tokenizer_config.json; of several named ones the default."""
    path = directory / "tokenizer_config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        beside = instead or directory / "chat_template.jinja"
        source = beside.read_text(encoding="utf-8") if instead or beside.exists() else config.get("chat_template")
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

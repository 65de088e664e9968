"""Fields of a JSON object in a file, read with checks that name the file, the field and the value. Pure."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import ConfigError


@dataclass(frozen=True, slots=True)
class JsonFields:
    """A JSON object and where it came from. A field that is null counts as absent."""

    path: str
    """The file, followed by the section inside it."""
    values: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> JsonFields:
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path} is not JSON: {error}") from error
        if not isinstance(values, dict):
            raise ConfigError(f"{path} is not a JSON object")
        return cls(str(path), values)

    def error(self, name: str, reason: str) -> ConfigError:
        return ConfigError(f"{self.path}: {name} = {self.values.get(name)!r}: {reason}")

    def get(self, name: str, default: Any = None) -> Any:
        value = self.values.get(name)
        return default if value is None else value

    def section(self, name: str) -> JsonFields:
        """A nested object; an absent one is empty."""
        value = self.get(name, {})
        if not isinstance(value, dict):
            raise self.error(name, "must be an object")
        return JsonFields(f"{self.path}: {name}", value)

    def positive_int(self, name: str, default: int | None = None) -> int:
        value = self.get(name, default)
        # bool is an int in Python, and no size.
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(name, "must be a positive integer")
        return value

    def positive_float(self, name: str, default: float | None = None) -> float:
        value = self.get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.error(name, "must be a number")
        if not value > 0 or not math.isfinite(value):
            raise self.error(name, "must be positive and finite")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, "must be true or false")
        return value

    def token_ids(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """An id, a list of ids, or nothing."""
        value = self.get(name, [])
        ids = value if isinstance(value, list) else [value]
        for token_id in ids:
            if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < vocab_size:
                raise self.error(name, f"must hold token ids below vocab_size ({vocab_size})")
        return tuple(ids)

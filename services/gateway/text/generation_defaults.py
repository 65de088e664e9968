"""What a model's generation_config.json recommends for fields that a request leaves out. Read at start-up."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engine.json_fields import JsonFields


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """OpenAI's own where the model says nothing."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def load(cls, directory: Path) -> GenerationDefaults:
        """Raises ConfigError for a value that no request could ask for."""
        path = directory / "generation_config.json"
        if not path.exists():
            return cls()
        fields = JsonFields.read(path)
        return cls(
            temperature=_number(fields, "temperature", 1.0, 0.0, 2.0),
            top_p=_number(fields, "top_p", 1.0, 1e-9, 1.0),
            top_k=int(_number(fields, "top_k", 0, 0, 2**31)),
            min_p=_number(fields, "min_p", 0.0, 0.0, 1.0),
            repetition_penalty=_number(fields, "repetition_penalty", 1.0, 0.01, 100.0),
        )


def _number(fields: JsonFields, name: str, default: float, low: float, high: float) -> float:
    value = fields.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise fields.error(name, f"must be a number between {low} and {high}")
    return value

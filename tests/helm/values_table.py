"""The table of helm/kvbaton/README.md, from values.schema.json.

python -m tests.helm.values_table       writes it; a test says when that was forgotten
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHART = Path(__file__).resolve().parents[2] / "helm" / "kvbaton"
BEGIN, END = "<!-- values: begin -->\n", "<!-- values: end -->\n"


def rows(schema: dict[str, Any], path: str = "") -> Iterator[str]:
    for name, field in schema["properties"].items():
        where = f"{path}{name}"
        if where == "global" or (where.startswith("decode.") and path == "decode."):
            continue
        if "default" in field:
            yield f"| `{where}` | `{json.dumps(field['default'])}` | {_text(field)} |"
        elif where == "decode":
            yield "| `decode` | | the decode workers: the same as `prefill` |"
        else:
            yield from rows(field, f"{where}.")


def _text(field: dict[str, Any]) -> str:
    choices = ", ".join(f"`{choice or 'empty'}`" for choice in field.get("enum", []))
    return field["description"].replace("|", "\\|") + (f" ({choices})" if choices else "")


def table() -> str:
    schema = json.loads((CHART / "values.schema.json").read_text())
    return "\n".join(["| value | default | what |", "| --- | --- | --- |", *rows(schema), ""])


def current() -> str:
    return (CHART / "README.md").read_text().partition(BEGIN)[2].partition(END)[0]


if __name__ == "__main__":
    readme = CHART / "README.md"
    head, _, rest = readme.read_text().partition(BEGIN)
    readme.write_text(head + BEGIN + table() + END + rest.partition(END)[2])

"""values.yaml, values.schema.json and the README's table are one thing."""

import json
from typing import Any

import yaml

from services.gateway.config import GatewayConfig
from services.worker.config import WorkerConfig
from tests.helm import values_table
from tests.support.chart import CHART

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
FREE = {"global", "affinity"}
"""Objects whose content is the API's affair."""


def test_the_readme_shows_the_values_of_the_schema() -> None:
    assert values_table.current() == values_table.table(), "run: python -m tests.helm.values_table"


def test_the_schema_names_exactly_the_values_and_their_defaults() -> None:
    def compare(schema: dict[str, Any], values: dict[str, Any], path: str) -> None:
        assert set(schema["properties"]) - {"global"} == set(values), path
        for name, value in values.items():
            field = schema["properties"][name]
            if "default" in field:
                assert field["default"] == value, f"{path}{name}"
            else:
                compare(field, value, f"{path}{name}.")

    compare(SCHEMA, VALUES, "")


def test_every_object_is_closed_or_free_by_intent() -> None:
    def check(name: str, schema: dict[str, Any]) -> None:
        if schema.get("type") == "object" and name not in FREE:
            assert "additionalProperties" in schema, name
            assert schema["additionalProperties"] is not True, name
        for child, field in schema.get("properties", {}).items():
            check(child, field)

    check("", SCHEMA)


def test_every_value_is_described() -> None:
    assert all(not row.rstrip().endswith("| |") for row in values_table.table().splitlines())


def test_reserved_settings_are_settings_of_the_processes() -> None:
    text = (CHART / "templates" / "_checks.tpl").read_text()
    reserved = text.partition('define "kvbaton.reservedSettings" -}}')[2].partition("{{-")[0].split()
    known = {name.replace("_", "-") for config in (GatewayConfig, WorkerConfig) for name in config.model_fields}
    assert set(reserved) <= known
    assert "api-credentials" in reserved

"""Everything rendered is what the API servers of these versions take, custom resources included."""

import functools
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
from referencing import Registry, Resource

from tests.support.chart import CASES, Helm

VERSIONS = ("1.29", "1.32", "1.35", "1.37")
SCHEMAS = Path(__file__).with_name("schemas")
CUSTOM = {
    "Route": "route_route.openshift.io_v1",
    "SecurityContextConstraints": "securitycontextconstraints_security.openshift.io_v1",
    "ServiceMonitor": "servicemonitor_v1",
    "PodMonitor": "podmonitor_v1",
    "PrometheusRule": "prometheusrule_v1",
    "HTTPRoute": "httproute_v1",
    "InferencePool": "inferencepool_v1",
}
NEEDS = {"claims": "1.34", "image volume": "1.31"}
"""The oldest version that has what the case asks for."""


UPSTREAM = Path(kubernetes_validate.__file__).with_name("kubernetes-json-schema")


def check(doc: dict, version: str) -> None:
    """Raises jsonschema.ValidationError; a kind without a schema is a KeyError or FileNotFoundError."""
    if doc["kind"] in CUSTOM:
        validator(SCHEMAS / f"{CUSTOM[doc['kind']]}.json").validate(doc)
    else:
        group = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", doc["apiVersion"])
        validator(UPSTREAM / f"v{version}.0-local-strict" / f"{doc['kind'].lower()}-{group}.json").validate(doc)


@functools.cache
def validator(path: Path) -> Any:
    schema = json.loads(path.read_text())
    return jsonschema.Draft202012Validator(schema, registry=definitions(path.with_name("_definitions.json")))


@functools.cache
def definitions(path: Path) -> Any:
    return Resource.from_contents(json.loads(path.read_text())) @ Registry() if path.exists() else Registry()


def newer(version: str, than: str) -> bool:
    return [int(part) for part in version.split(".")] >= [int(part) for part in than.split(".")]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", CASES)
def test_what_is_rendered_is_valid(helm: Helm, name: str, version: str) -> None:
    if not newer(version, NEEDS.get(name, "1.0")):
        assert "Kubernetes" in helm.refusal(CASES[name], kube=f"{version}.0")
        return
    docs = helm.render(CASES[name], kube=f"{version}.0")
    for doc in docs:
        check(doc, version)


def test_a_misspelt_field_would_be_noticed(helm4: Helm) -> None:
    docs = {doc["kind"]: doc for doc in helm4.render(CASES["everything"])}
    docs["Deployment"]["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    docs["Route"]["spec"]["tls"]["terminator"] = "edge"
    with pytest.raises(jsonschema.ValidationError):
        check(docs["Deployment"], "1.32")
    with pytest.raises(jsonschema.ValidationError):
        check(docs["Route"], "1.32")


def test_every_kind_that_the_chart_can_make_was_rendered(helm4: Helm) -> None:
    kinds = {doc["kind"] for values in CASES.values() for doc in helm4.render(values, kube="1.37.0")}
    assert kinds >= {*CUSTOM, "ResourceClaimTemplate", "PodDisruptionBudget", "NetworkPolicy", "ConfigMap", "Pod"}

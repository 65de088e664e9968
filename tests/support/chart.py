"""Rendering the chart with the real helm binaries, which scripts/fetch-helm puts into a cache folder."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "kvbaton"
ALL_APIS = (
    "route.openshift.io/v1",
    "gateway.networking.k8s.io/v1",
    "inference.networking.k8s.io/v1",
    "security.openshift.io/v1",
    "monitoring.coreos.com/v1",
    "policy/v1",
)
Doc = dict[str, Any]


@functools.cache
def tools() -> Path:
    """The folder with helm3, helm4 and kubectl; skips the test where they cannot be fetched."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "fetch-helm")], capture_output=True, text=True, timeout=500, check=False
    )
    if done.returncode:
        pytest.skip(f"no helm to test with: {done.stderr.strip()[-200:]}")
    return Path(done.stdout.strip())


@dataclass(frozen=True)
class Helm:
    """One helm binary with folders of its own."""

    program: Path

    def run(self, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        with tempfile.TemporaryDirectory() as home:
            folders = {f"HELM_{kind}_HOME": f"{home}/{kind}" for kind in ("CACHE", "CONFIG", "DATA")}
            environ = os.environ | folders
            command = [str(self.program), *arguments]
            return subprocess.run(
                command, capture_output=True, text=True, env=environ, timeout=60, check=False, **options
            )

    def template(
        self,
        values: Mapping[str, Any] | None = None,
        *flags: str,
        release: str = "kvbaton",
        kube: str = "1.32.0",
        apis: Sequence[str] = ALL_APIS,
    ) -> subprocess.CompletedProcess[str]:
        arguments = ["template", release, str(CHART), "--namespace", "serving", "--kube-version", kube, *flags]
        arguments += [part for api in apis for part in ("--api-versions", api)]
        return _run_once(self, (*arguments, "--values", "-"), yaml.safe_dump(dict(values or {})))

    def render(self, values: Mapping[str, Any] | None = None, *flags: str, **options: Any) -> list[Doc]:
        done = self.template(values, *flags, **options)
        assert done.returncode == 0, done.stderr
        return [doc for doc in yaml.safe_load_all(done.stdout) if doc]

    def refusal(self, values: Mapping[str, Any], **options: Any) -> str:
        """What helm says when it must not render."""
        done = self.template(values, **options)
        assert done.returncode != 0, "these values contradict themselves, and were rendered"
        return done.stderr


@functools.cache
def _run_once(helm: Helm, arguments: tuple[str, ...], values: str) -> subprocess.CompletedProcess[str]:
    """Many tests look at the same rendering."""
    return helm.run(*arguments, input=values)


def find(docs: list[Doc], kind: str, name: str) -> Doc:
    (found,) = [doc for doc in docs if doc["kind"] == kind and doc["metadata"]["name"] == name]
    return found


def pod_specs(docs: list[Doc]) -> Iterator[tuple[str, Doc]]:
    """Name and pod spec of every object that makes pods."""
    for doc in docs:
        if doc["kind"] == "Pod":
            yield doc["metadata"]["name"], doc["spec"]
        elif "template" in doc.get("spec", {}) and "spec" in doc["spec"]["template"]:
            yield doc["metadata"]["name"], doc["spec"]["template"]["spec"]


def containers(spec: Doc) -> list[Doc]:
    return [*spec.get("initContainers", []), *spec["containers"]]


MODEL: Doc = {"model": {"uri": "pvc://models/some/model"}}
PROFILES = ("cpu-demo", "gpu-node", "h200-rdma", "mig", "openshift")
EVERYTHING: Doc = {
    "model": {"uri": "hf://some/model@main", "tokenSecret": "hub", "env": {"HF_HUB_ENABLE_HF_TRANSFER": True}},
    "fabric": {"resources": {"rdma/ib": 1}, "networks": "a-net", "env": {"UCX_TLS": "rc,tcp"}},
    "monitoring": {
        "serviceMonitor": {"enabled": True},
        "prometheusRule": {"enabled": True},
        "dashboard": {"enabled": True},
    },
    "networkPolicy": {"enabled": True, "clients": [{"namespaceSelector": {}}]},
    "route": {"enabled": True, "host": "llm.example.org"},
    "httpRoute": {"enabled": True, "parentRefs": [{"name": "a-gateway"}], "hostnames": ["llm.example.org"]},
    "inferencePool": {"enabled": True, "endpointPicker": {"name": "picker"}},
    "openshift": {"scc": {"create": True}},
    "planner": {"enabled": True, "image": {"repository": "example.org/scaler", "tag": 2}, "args": ["--loop"]},
}
"""Every switch on."""
EXTERNAL: Doc = MODEL | {"prefill": {"scaler": "external"}, "decode": {"scaler": "external"}}
DRA: Doc = MODEL | {"decode": {"gpu": {"dra": {"deviceClassName": "gpu.example.com", "count": 2}}}}
OCI: Doc = {"model": {"uri": "oci://registry.example.org:5000/models/llama:v1//weights"}}
CASES: dict[str, Doc] = {
    **{profile: (MODEL if profile != "cpu-demo" else {}) | {"profile": profile} for profile in PROFILES},
    "everything": EVERYTHING,
    "external scaler": EXTERNAL,
    "claims": DRA,
    "image volume": OCI,
}

"""What a Pod object of the Kubernetes API says of a worker. Pure: JSON objects in, views out.

A pod is given work while it is Ready and is not being deleted; one that is being deleted keeps the requests it has.
The worker itself knows better than its pod whether it is ready: both must say so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ROLE_LABEL = "kvbaton.io/role"
ANNOTATIONS = "kvbaton.io/"
PORT_NAME = "http"
_WORKER_ROLES = frozenset({"prefill", "decode", "both"})


@dataclass(frozen=True, slots=True)
class WorkerPod:
    uid: str
    name: str
    role: str
    url: str
    problem: str
    """Why it is to be given no work; empty when it may."""
    annotations: Mapping[str, str] = field(default_factory=dict)


def read_pod(pod: Mapping[str, Any]) -> WorkerPod | None:
    """None for a pod that serves nobody: no address or no http port yet, ended, or not a worker's."""
    metadata, spec, status = pod.get("metadata") or {}, pod.get("spec") or {}, pod.get("status") or {}
    role = (metadata.get("labels") or {}).get(ROLE_LABEL, "")
    address, port = status.get("podIP"), _http_port(spec)
    if role not in _WORKER_ROLES or not address or port is None or status.get("phase") in ("Succeeded", "Failed"):
        return None
    host = f"[{address}]" if ":" in address else address
    annotations = metadata.get("annotations") or {}
    return WorkerPod(
        uid=metadata["uid"],
        name=metadata["name"],
        role=role,
        url=f"http://{host}:{port}",
        problem=_problem(metadata, status),
        annotations={name: text for name, text in annotations.items() if name.startswith(ANNOTATIONS)},
    )


def _problem(metadata: Mapping[str, Any], status: Mapping[str, Any]) -> str:
    if metadata.get("deletionTimestamp"):
        return "its pod is being deleted"
    conditions = status.get("conditions") or ()
    is_ready = any(c.get("type") == "Ready" and c.get("status") == "True" for c in conditions)
    return "" if is_ready else "its pod is not Ready"


def _http_port(spec: Mapping[str, Any]) -> int | None:
    ports = (port for container in spec.get("containers") or () for port in container.get("ports") or ())
    return next((int(port["containerPort"]) for port in ports if port.get("name") == PORT_NAME), None)


class PodTable:
    """The pods of one selector by uid, kept from a list and the events after it."""

    def __init__(self) -> None:
        self._pods: dict[str, WorkerPod] = {}

    def replace(self, pods: list[Mapping[str, Any]]) -> None:
        """A whole list: what is not in it is gone."""
        self._pods = {read.uid: read for pod in pods if (read := read_pod(pod)) is not None}

    def apply(self, kind: str, pod: Mapping[str, Any]) -> None:
        """A watch event: ADDED, MODIFIED or DELETED."""
        read = None if kind == "DELETED" else read_pod(pod)
        if read is None:
            self._pods.pop((pod.get("metadata") or {}).get("uid", ""), None)
        else:
            self._pods[read.uid] = read

    def by_url(self) -> dict[str, WorkerPod]:
        """Of two pods with one address, the one that may be given work: the other is on its way out."""
        found: dict[str, WorkerPod] = {}
        for pod in sorted(self._pods.values(), key=lambda pod: (pod.problem == "", pod.uid)):
            found[pod.url] = pod
        return found

"""One control plane, two nodes and one release for all tests of this folder, which run in the order of their names."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster import control_plane as plane
from tests.cluster.api import Object
from tests.cluster.control_plane import ControlPlane, control_plane
from tests.cluster.kubelet import Kubelet, running, wait
from tests.cluster.services import Services, is_ready
from tests.support.chart import CHART, tools

NAMESPACE = "serving"
NODES = ["node-a", "node-b"]
MODEL = "SmolLM2-135M-Instruct"
PROFILE: Object = {
    "profile": "cpu-demo",
    # Pods share the loopback interface. UCX listens on all of it, so each worker picks a port; and it connects only to
    # the address that the interface has.
    "fabric": {"port": 0, "advertise": "127.0.0.1"},
    "gateway": {"service": {"port": 8080}, "drainSeconds": 40},
    "prefill": {"drainSeconds": 40},
    "decode": {"drainSeconds": 40},
}
ROLLED_OUT_S = 420.0


@dataclass
class Cluster:
    plane: ControlPlane
    kubelet: Kubelet
    services: Services
    home: Path

    def run(self, *command: str, timeout_s: float = 600.0, **options: Any) -> str:
        """helm3, helm4 or kubectl with this cluster's kubeconfig; what it printed."""
        folders = {f"HELM_{kind}_HOME": str(self.home / kind) for kind in ("CACHE", "CONFIG", "DATA")}
        environ = os.environ | folders | {"KUBECONFIG": str(self.plane.kubeconfig), "HOME": str(self.home)}
        program = str(tools() / command[0])
        done = subprocess.run(
            [program, "--namespace", NAMESPACE, *command[1:]],
            capture_output=True, text=True, env=environ, timeout=timeout_s, check=False, **options,
        )  # fmt: skip
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    def helm(self, verb: str, *flags: str, values: Object | None = None, program: str = "helm4") -> str:
        given = yaml.safe_dump(merged(PROFILE, values or {}))
        wait_flag = ["--wait", "--timeout", f"{ROLLED_OUT_S:.0f}s"]
        return self.run(program, verb, "kvbaton", str(CHART), *wait_flag, *flags, "--values", "-", input=given)

    def pods(self, role: str = "") -> list[Object]:
        selector = "app.kubernetes.io/name=kvbaton" + (f",kvbaton.io/role={role}" if role else "")
        path = f"/api/v1/namespaces/{NAMESPACE}/pods"
        return self.plane.api.get(path, labelSelector=selector)["items"]  # type: ignore[no-any-return]

    def wait_rolled_out(self) -> None:
        """Every Deployment is complete and the pods of old replica sets are gone."""

        def complete() -> bool:
            deployments = self.plane.api.get(f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments")["items"]
            wanted = sum(d["spec"]["replicas"] for d in deployments)
            pods = [pod for pod in self.pods() if pod["metadata"]["labels"]["kvbaton.io/role"] != "check"]
            gateways = [pod for pod in pods if pod["metadata"]["labels"]["kvbaton.io/role"] == "gateway"]
            seen = len(self.services.endpoints(NAMESPACE, "kvbaton-gateway")) == len(gateways)
            return seen and len(pods) == wanted and all(is_ready(pod) for pod in pods)

        wait(complete, ROLLED_OUT_S, "all pods are ready and no old ones are left")

    @property
    def url(self) -> str:
        return f"http://{self.services.address(NAMESPACE, 'kvbaton-gateway')}:8080"

    @property
    def admin_url(self) -> str:
        return f"http://{self.services.address(NAMESPACE, 'kvbaton-admin')}:8001"


def merged(base: Object, over: Object) -> Object:
    both = dict(base)
    for key, value in over.items():
        both[key] = merged(both[key], value) if isinstance(value, dict) and isinstance(both.get(key), dict) else value
    return both


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    if lacking := plane.missing():
        pytest.skip(f"{', '.join(lacking)} not in {plane.binaries()}: run scripts/build-control-plane")
    folder = Path(tempfile.mkdtemp(prefix="kvbaton-cluster-"))
    folder.chmod(0o755)  # pods run as other users
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        control = stack.enter_context(control_plane(folder / "control-plane"))
        manifest = (Path(__file__).with_name("restricted-v2.yaml")).read_text()
        for doc in yaml.safe_load_all(manifest):
            group = "policy/v1beta1" if doc["kind"] == "PodSecurityPolicy" else "rbac.authorization.k8s.io/v1"
            plural = {"PodSecurityPolicy": "podsecuritypolicies"}.get(doc["kind"], doc["kind"].lower() + "s")
            control.api.create(f"/apis/{group}/{plural}", doc)
        control.api.create("/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
        services = Services(control.api)
        services.start()
        stack.callback(services.close)
        kubelet = stack.enter_context(
            running(Kubelet(control.api, NODES, folder / "kubelet", services.resolve, back_off_s=1.0))
        )
        accounts = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/default"
        wait(lambda: control.api.find(accounts), 60, "the namespace has its service account")
        if where := os.environ.get("KVBATON_CLUSTER_LOGS"):
            stack.callback(shutil.copytree, folder, where, dirs_exist_ok=True)
        yield Cluster(control, kubelet, services, folder / "home")

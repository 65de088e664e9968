"""The process kubelet: runs the pods of a control plane's nodes as local processes.

Each container's command is started on this machine, on the pod's own address of 127.1.0.0/16, with the pod's
environment, volumes, probes, hooks, grace and restarts; pod and node status are reported as by a kubelet, and logs are
served to `kubectl logs`. Run as root, processes get the UID that admission put into the pod.

Its limits: no image is used, the program comes from the PATH of this interpreter; no namespaces, so paths under mounts
are rewritten and 0.0.0.0 becomes the pod's address; names of Services are put into arguments as the addresses of
proxies (services.py); no resource is limited.
"""

from __future__ import annotations

import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.cluster.api import Api, Object
from tests.cluster.container import FIRST_BACK_OFF_S, now
from tests.cluster.pod import Pod

HEARTBEAT_S = 5.0
RETRY_S = 0.5


class Kubelet:
    """Of all the nodes it is given."""

    def __init__(
        self,
        api: Api,
        nodes: list[str],
        folder: Path,
        resolve: Callable[[str, str], str] = lambda _, text: text,
        back_off_s: float = FIRST_BACK_OFF_S,
    ) -> None:
        self.api, self.nodes, self.folder = api, nodes, folder
        self.pods: dict[str, Pod] = {}
        """By uid."""
        self._resolve = resolve
        self._back_off_s = back_off_s
        self._num_addresses = 0
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._server: ThreadingHTTPServer | None = None

    def start(self) -> None:
        self._server = _log_server(self, self.folder)
        for node in self.nodes:
            self.api.create("/api/v1/nodes", self._node(node))
        for work in (self._server.serve_forever, self._heartbeat, self._follow):
            threading.Thread(target=work, daemon=True).start()

    def close(self) -> None:
        """Kill what still runs."""
        self._closed.set()
        with self._lock:
            pods = list(self.pods.values())
        for pod in pods:
            pod.kill()
        for pod in pods:
            pod.join(15)
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def find(self, namespace: str, name: str) -> Pod | None:
        """The newest pod of that name, also if it has ended."""
        found = [p for p in list(self.pods.values()) if (p.pod["metadata"]["namespace"], p.name) == (namespace, name)]
        return found[-1] if found else None

    def _follow(self) -> None:
        while not self._closed.is_set():
            try:
                for kind, thing in self.api.follow("/api/v1/pods"):
                    if self._closed.is_set():
                        return
                    if kind == "LISTED":
                        self._listed(thing)
                    else:
                        self._changed(kind, thing)
            except Exception as error:  # an outage of the API: list again when it is back
                print(f"kubelet: {type(error).__name__}: {error}", flush=True)
                self._closed.wait(RETRY_S)

    def _listed(self, pods: Object) -> None:
        present = {pod["metadata"]["uid"] for pod in pods["items"]}
        for uid, pod in list(self.pods.items()):
            if uid not in present:
                pod.kill()
        for pod in pods["items"]:
            self._changed("MODIFIED", pod)

    def _changed(self, kind: str, pod: Object) -> None:
        metadata = pod["metadata"]
        if pod["spec"].get("nodeName") not in self.nodes:
            return
        known = self.pods.get(metadata["uid"])
        if kind == "DELETED":
            if known is not None:
                known.kill()
        elif metadata.get("deletionTimestamp"):
            if known is None or not known.is_alive():
                self.api.delete(f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}",
                                {"gracePeriodSeconds": 0})  # fmt: skip
            else:
                known.stop(float(metadata.get("deletionGracePeriodSeconds", 30)))
        elif known is None and pod.get("status", {}).get("phase") not in ("Succeeded", "Failed"):
            self._run(pod)

    def _run(self, pod: Object) -> None:
        self._num_addresses += 1
        address = f"127.1.{self._num_addresses // 250}.{self._num_addresses % 250 + 1}"
        folder = self.folder / "pods" / f"{pod['metadata']['name']}-{pod['metadata']['uid'][:6]}"
        runner = Pod(self.api, pod, address, folder, self._resolve, self._back_off_s)
        with self._lock:
            self.pods[runner.key] = runner
        runner.start()

    def _heartbeat(self) -> None:
        while not self._closed.is_set():
            for node in self.nodes:
                try:
                    self.api.patch(f"/api/v1/nodes/{node}/status", {"status": self._node(node)["status"]})
                except Exception as error:
                    print(f"kubelet: no heartbeat of {node}: {error}", flush=True)
            self._closed.wait(HEARTBEAT_S)

    def _node(self, name: str) -> Object:
        assert self._server is not None
        amounts = {"cpu": "16", "memory": "64Gi", "pods": "110"}
        ready = {"type": "Ready", "status": "True", "reason": "Started", "lastHeartbeatTime": now()}
        return {
            "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}},
            "status": {
                "capacity": amounts,
                "allocatable": amounts,
                "conditions": [ready],
                "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
                "daemonEndpoints": {"kubeletEndpoint": {"Port": self._server.server_address[1]}},
            },
        }


def _log_server(kubelet: Kubelet, folder: Path) -> ThreadingHTTPServer:
    """GET /containerLogs/NAMESPACE/POD/CONTAINER, which the API server asks for `kubectl logs`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            parts = self.path.partition("?")[0].strip("/").split("/")
            pod = kubelet.find(parts[1], parts[2]) if len(parts) == 4 and parts[0] == "containerLogs" else None
            path = pod.log_path(parts[3]) if pod is not None else None
            content = path.read_bytes() if path is not None and path.exists() else b""
            self.send_response(200 if pod is not None else 404)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    folder.mkdir(parents=True, exist_ok=True)
    key, certificate = folder / "kubelet.key", folder / "kubelet.crt"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"]
    subprocess.run([*command, "-keyout", str(key), "-out", str(certificate)], capture_output=True, check=True)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    return server


@contextmanager
def running(kubelet: Kubelet) -> Iterator[Kubelet]:
    kubelet.start()
    try:
        yield kubelet
    finally:
        kubelet.close()


def wait(condition: Callable[[], object], within_s: float, what: str) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s:.0f} s: {what}"
        time.sleep(0.2)

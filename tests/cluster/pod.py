"""The life of one pod on a node, and what the API is told of it.

volumes -> init containers, one after the other -> containers -> status on every change
deletionTimestamp -> every container stopped within the grace -> the object is deleted
"""

from __future__ import annotations

import base64
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tests.cluster.api import Api, Object
from tests.cluster.container import Container, Surroundings, expand, now
from tests.cluster.volumes import VolumeMissing, make_volumes, path_mapping

ROOT = Path(__file__).resolve().parents[2]
RETRY_S = 0.5
PASSED_ON = ("LANG", "http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "no_proxy")
"""What the image of a real installation would bring: certificates, proxies and the package index of this machine."""


class Pod(threading.Thread):
    def __init__(
        self,
        api: Api,
        pod: Object,
        address: str,
        folder: Path,
        resolve: Callable[[str, str], str],
        back_off_s: float,
    ) -> None:
        """`resolve(namespace, text)` puts addresses in the place of names of services."""
        super().__init__(daemon=True, name=pod["metadata"]["name"])
        self.api, self.pod, self.address, self.folder = api, pod, address, folder
        self._resolve = resolve
        self._changed = threading.Event()
        self._stopping = threading.Event()
        self._over = threading.Event()
        self._gone = False
        self._started_at = now()
        self._volumes: dict[str, Path] = {}
        context = pod["spec"].get("securityContext") or {}
        spec_user = (pod["spec"]["containers"][0].get("securityContext") or {}).get(
            "runAsUser", context.get("runAsUser")
        )
        self._user = spec_user if os.geteuid() == 0 else None
        around = Surroundings(
            address=address,
            environ=self._environ,
            rewrite=self._rewrite,
            log=self.log_path,
            user=self._user,
            cwd=folder,
            event=self._event,
            changed=self._changed.set,
            back_off_s=back_off_s,
        )
        policy = pod["spec"].get("restartPolicy", "Always")
        init_policy = "Never" if policy == "Never" else "OnFailure"
        self.inits = [Container(c, around, init_policy, is_init=True) for c in pod["spec"].get("initContainers", [])]
        self.containers = [Container(c, around, policy) for c in pod["spec"]["containers"]]

    @property
    def path(self) -> str:
        metadata = self.pod["metadata"]
        return f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"

    @property
    def key(self) -> str:
        uid: str = self.pod["metadata"]["uid"]
        return uid

    def log_path(self, container: str) -> Path:
        return self.folder / f"{container}.log"

    def stop(self, grace_s: float) -> None:
        """Begin the end; the object is deleted when it is over. Idempotent."""
        if not self._stopping.is_set():
            self._stopping.set()
            for container in (*self.inits, *self.containers):
                container.stop(grace_s)
            self._changed.set()

    def kill(self) -> None:
        """The object is gone already, or the node is."""
        self._gone = True
        self._stopping.set()
        for container in (*self.inits, *self.containers):
            container.kill()
        self._changed.set()

    def run(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        if self._user is not None:
            os.chown(self.folder, self._user, 0)
        reporter = threading.Thread(target=self._report_changes, daemon=True)
        reporter.start()
        self._changed.set()
        self._live()
        self._over.set()
        self._changed.set()
        reporter.join(30)
        if self._stopping.is_set() and not self._gone:
            preconditions = {"uid": self.key}
            self.api.delete(self.path, {"gracePeriodSeconds": 0, "preconditions": preconditions})
        for volume in self._volumes.values():
            shutil.rmtree(volume, ignore_errors=True)

    def _live(self) -> None:
        if not self._prepare():
            return
        for container in self.inits:
            container.run()
            if container.exit_code != 0:
                return
        threads = [threading.Thread(target=container.run, daemon=True) for container in self.containers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _prepare(self) -> bool:
        owner = None if self._user is None else (self._user, 0)
        while not self._stopping.is_set():
            try:
                self._volumes = make_volumes(self.api, self.pod, self.folder, owner)
                return True
            except VolumeMissing as error:
                self._event("FailedMount", str(error))
                self._stopping.wait(RETRY_S)
        return False

    # What a container sees

    def _rewrite(self, container: Object) -> Callable[[str], str]:
        mapped = path_mapping(container, self._volumes)
        namespace = self.pod["metadata"]["namespace"]
        return lambda text: self._resolve(namespace, mapped(text))

    def _environ(self, container: Object) -> dict[str, str]:
        host, _, port = self.api.url.removeprefix("https://").rpartition(":")
        path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
        environ = {
            "PATH": path,
            "PYTHONPATH": str(ROOT),
            "KUBERNETES_SERVICE_HOST": host,
            "KUBERNETES_SERVICE_PORT": port,
        }
        for name, text in os.environ.items():
            if name in PASSED_ON or name.startswith(("PIP_", "SSL_", "REQUESTS_CA")):
                environ[name] = text
        given: dict[str, str] = {}
        for variable in container.get("env", []):
            text = self._value(variable)
            given[variable["name"]] = expand(text, given)
        return environ | given

    def _value(self, variable: Object) -> str:
        source = variable.get("valueFrom")
        if source is None:
            return str(variable.get("value", ""))
        if "fieldRef" in source:
            known = {
                "status.podIP": self.address,
                "metadata.name": self.pod["metadata"]["name"],
                "metadata.namespace": self.pod["metadata"]["namespace"],
                "spec.nodeName": self.pod["spec"]["nodeName"],
            }
            return known[source["fieldRef"]["fieldPath"]]
        reference = source["secretKeyRef"]
        secret = self.api.get(f"/api/v1/namespaces/{self.pod['metadata']['namespace']}/secrets/{reference['name']}")
        return base64.b64decode(secret["data"][reference["key"]]).decode()

    # What the API is told

    def _report_changes(self) -> None:
        while not self._over.is_set() or self._changed.is_set():
            if not self._changed.wait(0.2):
                continue
            self._changed.clear()
            if self._gone:
                return
            try:
                self.api.patch(f"{self.path}/status", {"metadata": {"uid": self.key}, "status": self._status()})
            except Exception as error:  # the API may be down, or the pod gone: said again with the next change
                if "NotFound" in str(error) or "the UID in the precondition" in str(error):
                    return
                self._changed.set()
                time.sleep(RETRY_S)

    def _status(self) -> Object:
        initialized = all(container.exit_code == 0 for container in self.inits)
        ready = initialized and all(container.ready for container in self.containers)
        conditions = [
            {"type": "PodScheduled", "status": "True"},
            {"type": "Initialized", "status": str(initialized)},
            {"type": "ContainersReady", "status": str(ready)},
            {"type": "Ready", "status": str(ready)},
        ]
        for condition in conditions:
            condition["lastTransitionTime"] = now()
        return {
            "phase": self._phase(),
            "conditions": conditions,
            "hostIP": "127.0.0.1",
            "podIP": self.address,
            "podIPs": [{"ip": self.address}],
            "startTime": self._started_at,
            "initContainerStatuses": [container.status() for container in self.inits],
            "containerStatuses": [container.status() for container in self.containers],
        }

    def _phase(self) -> str:
        if any(c.done and c.exit_code for c in self.inits) and self.pod["spec"].get("restartPolicy") == "Never":
            return "Failed"
        if all(container.done for container in self.containers):
            return "Failed" if any(container.exit_code for container in self.containers) else "Succeeded"
        return "Running" if any("running" in c.state or c.restarts for c in self.containers) else "Pending"

    def _event(self, reason: str, message: str) -> None:
        metadata = self.pod["metadata"]
        print(f"pod {metadata['name']}: {reason}: {message}", flush=True)
        event = {
            "metadata": {"generateName": f"{metadata['name']}.", "namespace": metadata["namespace"]},
            "involvedObject": {
                "kind": "Pod",
                "namespace": metadata["namespace"],
                "name": metadata["name"],
                "uid": self.key,
            },
            "reason": reason,
            "message": message,
            "type": "Warning",
            "source": {"component": "process-kubelet"},
            "firstTimestamp": now(),
            "lastTimestamp": now(),
            "count": 1,
        }
        try:
            self.api.create(f"/api/v1/namespaces/{metadata['namespace']}/events", event)
        except Exception as error:
            print(f"an event was not taken: {error}", flush=True)

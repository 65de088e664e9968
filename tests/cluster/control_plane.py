"""A real Kubernetes control plane on loopback: etcd, API server, controller manager, scheduler. For nodes: kubelet.py.

Admission refuses what OpenShift's restricted-v2 refuses.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from tests.cluster.api import Api

READY_S = 60.0
STOP_S = 10.0
PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")


def binaries() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(os.environ.get("KVBATON_TOOLS_DIR") or Path(cache) / "kvbaton-tools") / "control-plane"


def missing() -> list[str]:
    return [name for name in PROGRAMS if not os.access(binaries() / name, os.X_OK)]


@dataclass
class ControlPlane:
    folder: Path
    api: Api
    kubeconfig: Path
    port: int
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def stop_program(self, name: str) -> None:
        _stop(self.processes.pop(name))

    def start_api_server(self) -> None:
        self.processes["kube-apiserver"] = _api_server(self.folder, self.port, self.etcd_port)
        _wait_ready(self.api, self.processes["kube-apiserver"], self.folder)

    etcd_port: int = 0


@contextmanager
def control_plane(folder: Path) -> Iterator[ControlPlane]:
    """Everything of it lives in `folder` and ends with the context."""
    folder.mkdir(parents=True)
    etcd_port, peer_port, port = (_free_port() for _ in range(3))
    token = secrets.token_hex(16)
    (folder / "tokens.csv").write_text(f'{token},admin,admin,"system:masters"\n')
    for arguments in (("genrsa", "-out", "sa.key", "2048"), ("rsa", "-in", "sa.key", "-pubout", "-out", "sa.pub")):
        subprocess.run(["openssl", *arguments], cwd=folder, capture_output=True, check=True)
    with ExitStack() as stack:
        etcd = f"http://127.0.0.1:{etcd_port}"
        peer = f"http://127.0.0.1:{peer_port}"
        flags = {"data-dir": "etcd", "listen-client-urls": etcd, "advertise-client-urls": etcd}
        flags |= {"listen-peer-urls": peer, "initial-advertise-peer-urls": peer, "initial-cluster": f"default={peer}"}
        processes = {"etcd": _start(folder, "etcd", flags)}
        stack.callback(lambda: [_stop(process) for process in reversed(processes.values())])
        processes["kube-apiserver"] = _api_server(folder, port, etcd_port)
        _wait_for(folder / "certs" / "apiserver.crt", processes["kube-apiserver"], folder)
        api = Api(f"https://127.0.0.1:{port}", token, folder / "certs" / "apiserver.crt")
        stack.callback(api.close)
        _wait_ready(api, processes["kube-apiserver"], folder)
        kubeconfig = _write_kubeconfig(folder, api)
        common: dict[str, str] = {
            "kubeconfig": str(kubeconfig),
            "leader-elect": "false",
            "port": "0",
            "secure-port": "0",
        }
        keys = {
            "service-account-private-key-file": "sa.key",
            "use-service-account-credentials": "true",
            "root-ca-file": str(api.ca_file),
        }
        processes["kube-controller-manager"] = _start(folder, "kube-controller-manager", common | keys)
        processes["kube-scheduler"] = _start(folder, "kube-scheduler", common)
        yield ControlPlane(folder, api, kubeconfig, port, processes, etcd_port)


def _api_server(folder: Path, port: int, etcd_port: int) -> subprocess.Popen[bytes]:
    flags = {
        "etcd-servers": f"http://127.0.0.1:{etcd_port}",
        "secure-port": str(port),
        "bind-address": "127.0.0.1",
        "insecure-port": "0",
        "cert-dir": "certs",
        "service-cluster-ip-range": "10.96.0.0/16",
        "token-auth-file": "tokens.csv",
        "authorization-mode": "RBAC",
        "service-account-key-file": "sa.pub",
        "service-account-signing-key-file": "sa.key",
        "service-account-issuer": "https://kubernetes.default.svc",
        "enable-admission-plugins": "PodSecurityPolicy",
        "endpoint-reconciler-type": "none",
        "kubelet-preferred-address-types": "InternalIP",
    }
    return _start(folder, "kube-apiserver", flags)


def _start(folder: Path, name: str, flags: dict[str, str]) -> subprocess.Popen[bytes]:
    command = [str(binaries() / name), *(f"--{flag}={value}" for flag, value in flags.items())]
    with (folder / f"{name}.log").open("ab") as log:
        return subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _wait_ready(api: Api, process: subprocess.Popen[bytes], folder: Path) -> None:
    deadline = time.monotonic() + READY_S
    while True:
        _assert_running(process, folder)
        if api.is_ready():
            return
        assert time.monotonic() < deadline, f"the API server was not ready within {READY_S} s"
        time.sleep(0.1)


def _wait_for(path: Path, process: subprocess.Popen[bytes], folder: Path) -> None:
    deadline = time.monotonic() + READY_S
    while not path.exists():
        _assert_running(process, folder)
        assert time.monotonic() < deadline, f"no {path.name} within {READY_S} s"
        time.sleep(0.05)


def _assert_running(process: subprocess.Popen[bytes], folder: Path) -> None:
    assert process.poll() is None, (folder / "kube-apiserver.log").read_text()[-2000:]


def _write_kubeconfig(folder: Path, api: Api) -> Path:
    path = folder / "kubeconfig"
    cluster = {"server": api.url, "certificate-authority": str(api.ca_file)}
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "clusters": [{"name": "test", "cluster": cluster}],
        "users": [{"name": "admin", "user": {"token": api.token}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "admin"}}],
    }
    path.write_text(yaml.safe_dump(content))
    path.chmod(0o600)
    return path


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])

"""What UCX needs of a machine, and what is said where it is not there."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.cluster import SECRET, Process, WorkerProcess, free_port, wait_until
from tests.support.tiny_model import make_tiny_model

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.mark.parametrize(("num_endpoints", "num_rounds"), [(100, 5), (300, 1)])
def test_hundreds_of_endpoints_at_once(num_endpoints: int, num_rounds: int) -> None:
    command = [sys.executable, "-m", "tests.support.many_endpoints", str(num_endpoints), str(num_rounds)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize(
    "environ", [{"UCX_TLS": "self"}, {"UCX_TLS": "no_such_transport"}, {"UCX_NET_DEVICES": "no_such_device"}]
)
def test_a_fabric_that_cannot_work_ends_the_worker_with_its_reason(model: Path, environ: dict[str, str]) -> None:
    worker = WorkerProcess("decode", model, "--num-blocks", "20", environ=environ)
    try:
        assert worker.wait(90) == 1
        said = worker.output()
        assert "stopping: " in said
        assert "UCX" in said or "ucx" in said, said[-2000:]
    finally:
        worker.stop()
        worker.close()


def test_a_peer_that_cannot_be_reached_is_named_with_the_devices_within_the_bound() -> None:
    """10.255.255.1 swallows packets, or is unroutable; either way nothing waits for longer than the bound."""
    code = """
import asyncio
from transport.errors import ConnectFailed
from transport.ucx import UcxPlane
async def main():
    plane = UcxPlane()
    try:
        await plane.connect("10.255.255.1:13337")
    except ConnectFailed as error:
        print(error)
    await plane.close()
asyncio.run(main())
"""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert time.monotonic() - began < 30
    assert "10.255.255.1:13337" in done.stdout, done.stderr[-2000:]
    assert "transports" in done.stdout


def test_the_advertised_address_is_the_one_that_was_set(model: Path) -> None:
    """Never simply that of the first interface; the probe has gone over it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(("192.0.2.1", 9))  # sends nothing: which address would be ours
        except OSError:
            pytest.skip("no interface but loopback")
        address = sock.getsockname()[0]
    flags = ["--num-blocks", "20", "--fabric-listen", "0.0.0.0:0", "--advertise", address]
    worker = WorkerProcess("decode", model, *flags)
    try:
        worker.wait_ready()
        assert worker.info().fabric_address.startswith(f"{address}:")
    finally:
        assert worker.stop() == 0
        worker.close()


def test_listening_everywhere_needs_an_address_to_advertise(model: Path) -> None:
    listen = f"127.0.0.1:{free_port()}"
    refused = Process("decode", "--model", str(model), "--listen", listen, "--fabric-listen", "0.0.0.0:0")
    assert refused.wait(60) == 2
    assert "advertise" in refused.output()
    refused.close()


def test_a_worker_on_the_cpu_never_touches_cuda_and_never_forks(model: Path) -> None:
    worker = WorkerProcess("both", model, "--num-blocks", "20")
    try:
        worker.wait_ready()
        children = Path(f"/proc/{worker.pid}/task/{worker.pid}/children").read_text().split()
        assert not children, "UCX does not survive a fork"
        maps = Path(f"/proc/{worker.pid}/maps").read_text()
        assert "libcuda.so" not in maps
        assert not [fd for fd in Path(f"/proc/{worker.pid}/fd").iterdir() if "nvidia" in _target(fd)]
        wait_until(lambda: worker.get("/health").status_code == 200, "it is healthy", worker)
        assert SECRET not in worker.output()
    finally:
        worker.stop()
        worker.close()


def _target(fd: Path) -> str:
    try:
        return str(fd.readlink())
    except OSError:
        return ""

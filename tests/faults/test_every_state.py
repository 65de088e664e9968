"""A worker is killed or stopped while a handoff is in a given state, under load: every answer is right, nothing is
left anywhere, the others go on, and the worker is used again afterwards.

A state is held by the fault shim of whoever has to send what ends it.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.support.cluster import Cluster, WorkerProcess, running, wait_until
from tests.support.load import HealthWatch, Load, undisturbed
from tests.support.tiny_model import make_tiny_model

HOLD_S = 6
NUM_CLIENTS = 3


@dataclass(frozen=True)
class Pin:
    """What holds handoffs in a state, and where the state shows."""

    prefill: str = ""
    decode: str = ""
    side: str = "receiver"
    state: str = ""
    injected: tuple[str, str] | None = None
    """(role, action:kind): the fault that must have happened too, where the state passes by itself."""


PINS = {
    "the prompt is being computed, its first chunks are on their way": Pin(
        prefill="pause:step:*:0.5", side="sender", state="shipping", injected=("prefill", "pause:step")
    ),
    "reserved, not yet opened": Pin(prefill=f"delay:open:*:{HOLD_S}", state="expected"),
    "every segment is there, the commit is not": Pin(
        prefill=f"delay:commit:*:{HOLD_S}", state="receiving", injected=("prefill", "delay:commit")
    ),
    "committed, a segment is missing": Pin(
        prefill="drop:segment:2", decode=f"delay:resend:*:{HOLD_S}", state="closing"
    ),
    "not yet acknowledged": Pin(decode=f"delay:ack:*:{HOLD_S}", side="sender", state="committing"),
    "decoding": Pin(),
}


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, dict[int, str]]]:
    model = make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", hidden=128, layers=4)
    flags = ["--num-blocks", "400", "--max-batch-tokens", "64", "--max-num-seqs", "16", "--test-faults", ""]
    flags += ["--max-segment-bytes", "32768", "--fabric-silence-s", "2", "--no-prefix-caching"]
    gateway_flags = ["--local-prefill-max-tokens", "0", "--poll-s", "0.3", "--poll-timeout-s", "1"]
    gateway_flags += ["--lost-after-s", "1.5", "--recovery-wait-s", "30", "--max-attempts", "5"]
    roles = ["prefill", "prefill", "decode", "decode"]
    fabric = {"prefill": flags, "decode": flags}
    with running(model, roles, worker_flags=fabric, gateway_flags=gateway_flags, fixed_fabric_ports=True) as cluster:
        yield cluster, undisturbed(cluster, range(6))


def set_faults(worker: WorkerProcess, faults: str) -> None:
    worker.put("/debug/faults", faults).raise_for_status()


def in_state(cluster: Cluster, pin: Pin, role: str) -> WorkerProcess | None:
    """The worker of `role` that has a handoff in the state of the pin."""
    if pin.injected is not None:
        done = [w.get("/debug/faults").json().get(pin.injected[1], 0) for w in cluster.of_role(pin.injected[0])]
        if not any(done):
            return None
    shows = "prefill" if pin.side == "sender" else "decode"
    if not any(_has(worker, pin) for worker in cluster.of_role(shows)):
        return None
    own = "sender" if role == "prefill" else "receiver"
    return next((w for w in cluster.of_role(role) if w.ledger()[own]["open"]), None)


def _has(worker: WorkerProcess, pin: Pin) -> bool:
    ledger: dict[str, Any] = worker.ledger()
    if not pin.state:
        return bool(ledger["requests"]["running"])
    return bool(ledger[pin.side]["states"][pin.state]["count"])


def find_victim(cluster: Cluster, pin: Pin, role: str) -> WorkerProcess:
    found: list[WorkerProcess] = []

    def reached() -> bool:
        if not pin.state:  # decoding: whoever has requests
            found.extend(w for w in cluster.of_role(role) if w.ledger()["open_streams"])
        elif (worker := in_state(cluster, pin, role)) is not None:
            found.append(worker)
        return bool(found)

    def shown() -> str:
        return "\n".join(f"{w.role} {w.get('/debug/faults').text} {w.ledger()}" for w in cluster.workers)

    wait_until(reached, shown, cluster.of_role(role)[0], timeout_s=30)
    return found[0]


@pytest.mark.parametrize("what", ["killed", "stopped"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("state", PINS)
def test_a_worker_ends_while(system: tuple[Cluster, dict[int, str]], state: str, role: str, what: str) -> None:
    cluster, expected = system
    pin = PINS[state]
    with Load(cluster, NUM_CLIENTS, expected) as load:
        load.wait_for(NUM_CLIENTS)
        for worker in cluster.of_role("decode"):  # first: they hold what a fault of prefill brings about
            set_faults(worker, pin.decode)
        for worker in cluster.of_role("prefill"):
            set_faults(worker, pin.prefill)
        victim = find_victim(cluster, pin, role)
        survivors = [worker for worker in cluster.workers if worker is not victim]
        with HealthWatch([worker.url for worker in survivors] + [cluster.gateway.url]) as health:
            victim.send(signal.SIGKILL if what == "killed" else signal.SIGSTOP)
            for worker in survivors:
                set_faults(worker, "")
            load.wait_for(3 * NUM_CLIENTS)
        health.assert_prompt()
        if what == "killed":
            victim.wait()
            victim.start()
            victim.wait_ready()
        else:
            victim.send(signal.SIGCONT)
            set_faults(victim, "")
        cluster.wait_usable()
        load.wait_for(2 * NUM_CLIENTS)
    load.assert_right()
    cluster.assert_idle()
    for worker in cluster.workers:
        ledger = worker.ledger()
        assert not ledger["receiver"].get("quarantined_bytes"), ledger
        assert not ledger["sender"].get("quarantined_bytes"), ledger


def test_faults_are_only_for_those_who_hold_the_token(system: tuple[Cluster, dict[int, str]]) -> None:
    worker = system[0].workers[0]
    assert httpx.put(worker.url + "/debug/faults", content="drop:open:*", timeout=5).status_code == 401
    assert worker.put("/debug/faults", "no fault").status_code == 400

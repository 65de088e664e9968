"""Two processes over real UCX: one is killed, stopped or restarted, and the other goes on."""

from __future__ import annotations

import json
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 30.0
NUM_TOKENS = 2000
"""16 segments."""
HOLD_AT = 600


class Peer:
    def __init__(self, role: str, incarnation: str, port: int = 0) -> None:
        command = [sys.executable, "-m", "tests.support.transport_peer", role, str(port), incarnation]
        self.incarnation = incarnation
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self._events: queue.Queue[dict[str, Any]] = queue.Queue()
        self._errors: list[str] = []
        self._threads = [threading.Thread(target=target, daemon=True) for target in (self._read, self._read_errors)]
        for thread in self._threads:
            thread.start()
        try:
            self.address = self.wait("address" if role == "receiver" else "started").get("address", "")
        except AssertionError:
            self.kill()
            raise

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._events.put(json.loads(line))

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        self._errors.extend(self.process.stderr)

    def do(self, do: str, **fields: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do} | fields) + "\n")
        self.process.stdin.flush()

    def wait(self, *events: str, number: int | None = None) -> dict[str, Any]:
        """The next of these events; others are passed over."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            try:
                event = self._events.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"no {events} within {DEADLINE_S} s\n" + "".join(self._errors)) from None
            if event["event"] in events and number in (None, event.get("number")):
                return event

    def snapshot(self) -> dict[str, Any]:
        self.do("snapshot")
        return self.wait("snapshot")

    def settled(self) -> dict[str, Any]:
        """The snapshot once nothing is open or lent."""
        deadline = time.monotonic() + DEADLINE_S
        while (found := self.snapshot())["open"] or found["staging_bytes"]:
            assert time.monotonic() < deadline, found
            time.sleep(0.05)
        assert found["quarantined_bytes"] == 0
        return found

    def kill(self) -> None:
        self.process.kill()
        self._join()

    def close(self) -> None:
        """Asserts that it ends by itself, with status 0."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            status = self.process.wait(DEADLINE_S)
        finally:
            self.process.kill()
            self._join()
        assert status == 0, f"status {status}\n" + "".join(self._errors)

    def _join(self) -> None:
        self.process.wait(DEADLINE_S)
        for thread in self._threads:
            thread.join(DEADLINE_S)
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()


@pytest.fixture
def start() -> Iterator[Callable[..., Peer]]:
    peers: list[Peer] = []

    def begin(role: str, incarnation: str, port: int = 0) -> Peer:
        peers.append(Peer(role, incarnation, port))
        return peers[-1]

    yield begin
    for peer in peers:
        if peer.process.poll() is None:
            peer.process.send_signal(signal.SIGCONT)
            peer.kill()


@pytest.fixture
def pair(start: Callable[..., Peer]) -> tuple[Peer, Peer]:
    return start("sender", "s1"), start("receiver", "r1", free_port())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def ship(sender: Peer, receiver: Peer, number: int, *, hold_at: int | None = None, lease_s: float = 20.0) -> None:
    receiver.do("expect", number=number, num_tokens=NUM_TOKENS, lease_s=lease_s, sender=sender.incarnation)
    receiver.wait("expecting", number=number)
    sender.do(
        "ship",
        number=number,
        num_tokens=NUM_TOKENS,
        address=receiver.address,
        incarnation=receiver.incarnation,
        hold_at=hold_at,
    )


def arrives(sender: Peer, receiver: Peer, number: int) -> None:
    ship(sender, receiver, number)
    acked = sender.wait("acked", "failed", number=number)
    assert acked["event"] == "acked", acked
    assert acked["lane"].startswith("tcp/")
    committed = receiver.wait("committed", "failed", number=number)
    assert (committed["event"], committed["num_tokens"], committed["wrong"]) == ("committed", NUM_TOKENS, [])


def in_mid_transfer(sender: Peer, receiver: Peer, number: int, **options: Any) -> None:
    ship(sender, receiver, number, hold_at=HOLD_AT, **options)
    sender.wait("holding", number=number)
    receiver.wait("written", number=number)


def test_a_receiver_killed_in_mid_transfer_and_restarted_on_its_port(
    pair: tuple[Peer, Peer], start: Callable[..., Peer]
) -> None:
    sender, receiver = pair
    port = int(receiver.address.rpartition(":")[2])
    for round_ in range(3):
        in_mid_transfer(sender, receiver, 10 * round_)
        receiver.kill()
        assert "lost" in sender.wait("failed", "acked", number=10 * round_)["reason"]
        sender.settled()
        receiver = start("receiver", f"r{round_ + 2}", port)
        arrives(sender, receiver, 10 * round_ + 1)
    assert sender.settled()["connections"] == 1, "those to the dead are dropped"
    receiver.settled()
    sender.close()
    receiver.close()


def test_a_sender_killed_in_mid_transfer(pair: tuple[Peer, Peer], start: Callable[..., Peer]) -> None:
    sender, receiver = pair
    for round_ in range(3):
        in_mid_transfer(sender, receiver, 10 * round_)
        sender.kill()
        assert "lost" in receiver.wait("failed", "committed", number=10 * round_)["reason"]
        receiver.settled()
        sender = start("sender", f"s{round_ + 2}")
        arrives(sender, receiver, 10 * round_ + 1)
    sender.close()
    receiver.close()


def test_a_stopped_receiver_is_given_up_by_our_own_clock_and_used_again_later(pair: tuple[Peer, Peer]) -> None:
    sender, receiver = pair
    in_mid_transfer(sender, receiver, 1)
    receiver.process.send_signal(signal.SIGSTOP)
    assert "silent" in sender.wait("failed", "acked", number=1)["reason"]
    sender.do("go")
    sender.settled()
    receiver.process.send_signal(signal.SIGCONT)
    assert receiver.wait("failed", "committed", number=1)["event"] == "failed"
    receiver.settled()
    arrives(sender, receiver, 2)
    sender.close()
    receiver.close()


def test_a_stopped_sender_loses_its_lease(pair: tuple[Peer, Peer]) -> None:
    sender, receiver = pair
    in_mid_transfer(sender, receiver, 1, lease_s=1.5)
    sender.process.send_signal(signal.SIGSTOP)
    assert "lease" in receiver.wait("failed", "committed", number=1)["reason"]
    receiver.settled()
    sender.process.send_signal(signal.SIGCONT)
    assert sender.wait("failed", "acked", number=1)["event"] == "failed"
    sender.do("go")
    sender.settled()
    arrives(sender, receiver, 2)
    sender.close()
    receiver.close()


def test_a_peer_that_pauses_during_the_handshake_is_an_error_and_no_crash(pair: tuple[Peer, Peer]) -> None:
    """The library would free what UCX still writes into; the answer that comes late finds it."""
    sender, receiver = pair
    for _ in range(3):
        receiver.process.send_signal(signal.SIGSTOP)
        sender.do("connect", address=receiver.address)
        failed = sender.wait("connect")["outcome"]
        assert receiver.address in failed
        assert "did not answer" in failed
        assert "transports" in failed
        receiver.process.send_signal(signal.SIGCONT)
        sender.do("connect", address=receiver.address)
        assert sender.wait("connect")["outcome"] == "connected"
    for number in range(20, 24):
        arrives(sender, receiver, number)
    sender.close()
    receiver.close()


def test_a_cancel_in_mid_transfer_leaves_the_connection_usable(pair: tuple[Peer, Peer]) -> None:
    sender, receiver = pair
    for number in range(0, 10, 2):
        in_mid_transfer(sender, receiver, number)
        receiver.do("cancel", number=number)
        assert "gave the request up" in sender.wait("failed", "acked", number=number)["reason"]
        sender.settled()
        receiver.settled()
        arrives(sender, receiver, number + 1)
    assert sender.snapshot()["connects"] == 1
    sender.close()
    receiver.close()


def test_strangers_on_the_port_harm_nobody(pair: tuple[Peer, Peer]) -> None:
    sender, receiver = pair
    port = int(receiver.address.rpartition(":")[2])
    strangers = []
    for junk in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 5000, b"\xff" * 5000, bytes(range(256)) * 8):
        strangers.append(socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S))
        strangers[-1].sendall(junk)
        arrives(sender, receiver, len(strangers))
    for stranger in strangers:
        stranger.close()
    arrives(sender, receiver, 100)
    sender.close()
    receiver.close()

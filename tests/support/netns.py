"""A network namespace joined to this one by a veth pair, whose link can be made slow or cut. Needs root."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

_numbers = itertools.count()


class Namespace:
    def __init__(self, name: str, link: str, host: str, guest: str) -> None:
        self.prefix = ["ip", "netns", "exec", name]
        """Before the command of a process that is to run in it."""
        self.host = host
        """Address of this side, and `guest` of the other."""
        self.guest = guest
        self._link = link

    def slow(self, rate: str) -> None:
        """Both directions; rate as tc spells it."""
        for prefix, device in (([], self._link), (self.prefix, "eth1")):
            shape = ["tbf", "rate", rate, "burst", "16kb", "latency", "2s"]
            _run(*prefix, "tc", "qdisc", "replace", "dev", device, "root", *shape)

    def fast(self) -> None:
        for prefix, device in (([], self._link), (self.prefix, "eth1")):
            _run(*prefix, "tc", "qdisc", "del", "dev", device, "root")

    def cut(self) -> None:
        """Packets are lost, and nobody is told."""
        _run("ip", "link", "set", self._link, "down")

    def mend(self) -> None:
        _run("ip", "link", "set", self._link, "up")


def why_not() -> str:
    """Why there can be no namespaces here, or nothing."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not (shutil.which("ip") and shutil.which("tc")):
        return "ip and tc (iproute2) are not installed"
    try:
        with namespace() as made:
            made.slow("10mbit")
    except subprocess.CalledProcessError as error:
        return f"no network namespaces here: {error.stderr.strip()}"
    return ""


@contextmanager
def namespace() -> Iterator[Namespace]:
    number = next(_numbers)
    name, link = f"kvb{os.getpid()}n{number}", f"kvb{os.getpid() % 10**6}v{number}"
    subnet = f"10.199.{os.getpid() % 250}.{4 * number % 250 // 4 * 4}"
    base, last = subnet.rsplit(".", 1)
    host, guest = f"{base}.{int(last) + 1}", f"{base}.{int(last) + 2}"
    _run("ip", "netns", "add", name)
    try:
        _run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth1", "netns", name)
        _run("ip", "addr", "add", f"{host}/30", "dev", link)
        _run("ip", "link", "set", link, "up")
        inside = ["ip", "netns", "exec", name]
        _run(*inside, "ip", "addr", "add", f"{guest}/30", "dev", "eth1")
        _run(*inside, "ip", "link", "set", "eth1", "up")
        _run(*inside, "ip", "link", "set", "lo", "up")
        yield Namespace(name, link, host, guest)
    finally:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", link], check=False, capture_output=True)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)

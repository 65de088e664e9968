"""Services without kube-proxy or DNS: a TCP proxy a Service on an address of 127.2.0.0/16, towards its ready endpoints.

The endpoints are those of the real endpoints controller; each new connection goes to the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import threading
from collections.abc import Iterator

from tests.cluster.api import Api, Object

RETRY_S = 0.5


class Services:
    def __init__(self, api: Api) -> None:
        self._api = api
        self._addresses: dict[tuple[str, str], str] = {}
        self._targets: dict[tuple[str, str, int], list[tuple[str, int]]] = {}
        """Service and port, to addresses and ports of pods."""
        self._turn = itertools.count()
        self._listening: set[tuple[str, str, int]] = set()
        self._loop = asyncio.new_event_loop()
        self._closed = False

    def start(self) -> None:
        for work in (self._loop.run_forever, self._follow):
            threading.Thread(target=work, daemon=True).start()

    def close(self) -> None:
        self._closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)

    def address(self, namespace: str, name: str) -> str:
        return self._addresses[namespace, name]

    def endpoints(self, namespace: str, name: str) -> list[tuple[str, int]]:
        return [t for key, found in self._targets.items() if key[:2] == (namespace, name) for t in found]

    def resolve(self, namespace: str, text: str) -> str:
        """Names of Services in URLs, as the cluster's DNS would have it."""

        def known(match: re.Match[str]) -> str:
            return "//" + self._addresses.get((namespace, match.group(1)), match.group(1))

        return re.sub(r"//([a-z0-9-]+)(?=[:/]|$)", known, text)

    def _follow(self) -> None:
        while not self._closed:
            try:
                for kind, thing in self._api.follow("/api/v1/endpoints"):
                    for endpoints in thing["items"] if kind == "LISTED" else [thing]:
                        self._changed(kind, endpoints)
            except Exception as error:
                if not self._closed:
                    print(f"services: {type(error).__name__}: {error}", flush=True)
                    threading.Event().wait(RETRY_S)

    def _changed(self, kind: str, endpoints: Object) -> None:
        metadata = endpoints["metadata"]
        service = self._api.find(f"/api/v1/namespaces/{metadata['namespace']}/services/{metadata['name']}")
        if service is None or kind == "DELETED":
            for key in [key for key in self._targets if key[:2] == (metadata["namespace"], metadata["name"])]:
                self._targets[key] = []
            return
        for port in service["spec"].get("ports", []):
            key = (metadata["namespace"], metadata["name"], port["port"])
            self._targets[key] = list(_ready(endpoints, port.get("name", "")))
            if key not in self._listening:
                self._listening.add(key)
                address = self._addresses.setdefault(key[:2], f"127.2.0.{len(self._addresses) + 1}")
                asyncio.run_coroutine_threadsafe(self._listen(key, address), self._loop).result(10)

    async def _listen(self, key: tuple[str, str, int], address: str) -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await self._relay(key, reader, writer)

        await asyncio.start_server(serve, address, key[2])

    async def _relay(
        self, key: tuple[str, str, int], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        targets = self._targets[key]
        if not targets:
            writer.close()  # a Service without endpoints takes no connection
            return
        try:
            there_reader, there_writer = await asyncio.open_connection(*targets[next(self._turn) % len(targets)])
        except OSError:
            writer.close()
            return
        try:
            await asyncio.gather(_pump(reader, there_writer), _pump(there_reader, writer))
        finally:
            for end in (writer, there_writer):
                end.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Bytes one way until that way ends; then the other side is told."""
    with contextlib.suppress(OSError):
        while chunk := await reader.read(65536):
            writer.write(chunk)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()


def _ready(endpoints: Object, port_name: str) -> Iterator[tuple[str, int]]:
    for subset in endpoints.get("subsets") or []:
        for port in subset.get("ports", []):
            if port.get("name", "") == port_name:
                yield from ((address["ip"], port["port"]) for address in subset.get("addresses") or [])

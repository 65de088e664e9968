"""Services without kube-proxy or DNS: a TCP proxy a Service on an address of 127.2.0.0/16, towards its endpoints.

The API takes no loopback address into an Endpoints object, so the rule of its controller is applied here: pods that the
selector matches, that are Ready and not being deleted. Each new connection goes to the next one.
"""

from __future__ import annotations

import asyncio
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
        self._runner = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._servers: list[asyncio.Server] = []
        self._relays: set[asyncio.Task[None]] = set()
        self._closed = False

    def start(self) -> None:
        threading.Thread(target=self._follow, daemon=True).start()
        self._runner.start()

    def close(self) -> None:
        self._closed = True
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._runner.join(10)
        self._loop.close()

    async def _end(self) -> None:
        for server in self._servers:
            server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

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
        pods: dict[str, Object] = {}
        while not self._closed:
            try:
                for kind, thing in self._api.follow("/api/v1/pods"):
                    if kind == "LISTED":
                        pods = {pod["metadata"]["uid"]: pod for pod in thing["items"]}
                    elif kind == "DELETED":
                        pods.pop(thing["metadata"]["uid"], None)
                    else:
                        pods[thing["metadata"]["uid"]] = thing
                    self._update(list(pods.values()))
            except Exception as error:
                if not self._closed:
                    print(f"services: {type(error).__name__}: {error}", flush=True)
                    threading.Event().wait(RETRY_S)

    def _update(self, pods: list[Object]) -> None:
        services = self._api.get("/api/v1/services")["items"]
        wanted = {}
        for service in services:
            metadata = service["metadata"]
            for port in service["spec"].get("ports", []):
                key = (metadata["namespace"], metadata["name"], port["port"])
                wanted[key] = list(_endpoints(service, port, pods))
                if key not in self._listening and service["spec"].get("selector"):
                    self._listening.add(key)
                    address = self._addresses.setdefault(key[:2], f"127.2.0.{len(self._addresses) + 1}")
                    asyncio.run_coroutine_threadsafe(self._listen(key, address), self._loop).result(10)
        self._targets = wanted

    async def _listen(self, key: tuple[str, str, int], address: str) -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._relays.add(task)  # the loop itself holds tasks weakly
            try:
                await self._relay(key, reader, writer)
            finally:
                self._relays.discard(task)

        self._servers.append(await asyncio.start_server(serve, address, key[2]))

    async def _relay(
        self, key: tuple[str, str, int], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        targets = self._targets.get(key, [])
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
    try:
        while chunk := await reader.read(65536):
            writer.write(chunk)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
    except OSError:
        writer.transport.abort()  # broken off on one side is broken off on the other


def _endpoints(service: Object, port: Object, pods: list[Object]) -> Iterator[tuple[str, int]]:
    selector = service["spec"].get("selector") or {}
    for pod in pods:
        same_namespace = pod["metadata"]["namespace"] == service["metadata"]["namespace"]
        labels = pod["metadata"].get("labels") or {}
        if selector and same_namespace and selector.items() <= labels.items() and is_ready(pod):
            yield pod["status"]["podIP"], _target_port(pod, port["targetPort"])


def is_ready(pod: Object) -> bool:
    """Ready, and not being deleted."""
    conditions = pod.get("status", {}).get("conditions") or []
    says_so = any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
    return says_so and not pod["metadata"].get("deletionTimestamp")


def _target_port(pod: Object, wanted: int | str) -> int:
    if isinstance(wanted, int):
        return wanted
    ports = [port for container in pod["spec"]["containers"] for port in container.get("ports", [])]
    return int(next(port["containerPort"] for port in ports if port.get("name") == wanted))

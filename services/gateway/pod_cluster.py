"""Workers found by watching Pods. The only importer of `kubernetes` among the services.

    list --resourceVersion--> watch --ends in time--> watch again from the last version
      ^                         |--410 Gone, broken, refused--> wait, list again
      '------------------------'

A thread lists and watches, and hands each change to the event loop. While the API does not answer, the last view
stays: the workers themselves are still asked every second. One namespace and one selector, so that releases do not
mix. The watch ends by itself every WATCH_S and its reads have a deadline: a connection that died in silence is
noticed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import urllib3
from kubernetes import client
from kubernetes.config import ConfigException
from kubernetes.config.incluster_config import InClusterConfigLoader

from services.gateway.cluster import DiscoveryError, PolledCluster
from services.gateway.pods import PodTable
from services.gateway.worker_client import WorkerClient

logger = logging.getLogger(__name__)
WATCH_S = 60
CONNECT_S = 5.0
SLACK_S = 15.0
"""How much later than asked the API may end a watch."""
FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 15.0
Event = tuple[str, Mapping[str, Any]]
_API_ERRORS = (client.ApiException, urllib3.exceptions.HTTPError, OSError, ValueError, KeyError)


class PodApi:
    """Lists and watches the pods of one namespace and selector. Blocking."""

    def __init__(self, namespace: str, selector: str, credentials: Path) -> None:
        """Raises DiscoveryError: the process does not run in a cluster, or has no token."""
        configuration = client.Configuration()
        configuration.retries = False
        try:
            loader: Any = InClusterConfigLoader  # untyped
            loader(str(credentials / "token"), str(credentials / "ca.crt")).load_and_set(configuration)
        except ConfigException as error:
            raise DiscoveryError(f"no access to the Kubernetes API with {credentials}: {error}") from error
        self._api = client.CoreV1Api(client.ApiClient(configuration))
        self._namespace = namespace
        self._selector = selector

    def list(self) -> tuple[list[Mapping[str, Any]], str]:
        """The pods and the version of the list."""
        response = self._call(CONNECT_S, resource_version=None)
        try:
            body = json.loads(response.data)
            return body["items"] or [], body["metadata"]["resourceVersion"]
        finally:
            response.release_conn()

    def watch(self, version: str) -> Iterator[Event]:
        """Events after `version`, until the API ends the watch. An ERROR event is one of them."""
        response = self._call(
            WATCH_S + SLACK_S,
            resource_version=version,
            watch=True,
            timeout_seconds=WATCH_S,
            allow_watch_bookmarks=True,
        )
        try:
            rest = b""
            for chunk in response.stream(65536):
                *lines, rest = (rest + chunk).split(b"\n")
                for line in filter(None, lines):
                    event = json.loads(line)
                    yield event["type"], event["object"]
        finally:
            response.close()
            response.release_conn()

    def _call(self, read_s: float, **options: Any) -> Any:
        return self._api.list_namespaced_pod(
            self._namespace,
            label_selector=self._selector,
            _preload_content=False,
            _request_timeout=(CONNECT_S, read_s),
            **options,
        )


class PodCluster(PolledCluster):
    """Create and start inside the running loop."""

    def __init__(
        self,
        namespace: str,
        selector: str,
        credentials: Path,
        worker_client: WorkerClient,
        *,
        poll_s: float,
        lost_after_s: float,
    ) -> None:
        """Raises DiscoveryError."""
        super().__init__(worker_client, poll_s=poll_s, lost_after_s=lost_after_s)
        self._api = PodApi(namespace, selector, credentials)
        self._table = PodTable()
        self._closed = threading.Event()
        self.connected = False
        """Whether the view follows the API; false while it shows the last state known."""

    def start(self) -> None:
        loop = asyncio.get_running_loop()

        def hand_over(change: Callable[[], None]) -> None:
            if not self._closed.is_set():
                loop.call_soon_threadsafe(change)

        # A daemon: the end of the process does not wait for a read that has a minute to go.
        threading.Thread(target=self._follow, args=(hand_over,), name="pods", daemon=True).start()

    async def close(self) -> None:
        self._closed.set()
        await super().close()

    def describe(self) -> list[dict[str, Any]]:
        pods = self._table.by_url()
        workers = super().describe()
        for worker in workers:
            if (pod := pods.get(worker["url"])) is not None:
                worker["pod"] = {"name": pod.name, "uid": pod.uid, "annotations": dict(pod.annotations)}
        return workers

    # The thread

    def _follow(self, hand_over: Callable[[Callable[[], None]], None]) -> None:
        wait_s = FIRST_WAIT_S
        while not self._closed.is_set():
            try:
                pods, version = self._api.list()
                hand_over(lambda pods=pods: self._replace(pods))  # type: ignore[misc]
                wait_s = FIRST_WAIT_S
                self._watch(version, hand_over)
            except _API_ERRORS as error:
                reason = _shown(error)
                hand_over(lambda reason=reason: self._lost_sight(reason))  # type: ignore[misc]
            self._closed.wait(wait_s * random.uniform(0.5, 1.0))
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    def _watch(self, version: str, hand_over: Callable[[Callable[[], None]], None]) -> None:
        """Returns when a new list is needed because the version is too old. Raises an API error."""
        while not self._closed.is_set():
            for kind, thing in self._api.watch(version):
                if kind == "ERROR":
                    if thing.get("code") == 410:
                        return
                    raise ValueError(f"the watch ended: {thing.get('message')}")
                version = thing["metadata"]["resourceVersion"]
                if kind != "BOOKMARK":
                    hand_over(lambda kind=kind, thing=thing: self._event(kind, thing))  # type: ignore[misc]

    # The event loop

    def _replace(self, pods: list[Mapping[str, Any]]) -> None:
        if not self.connected:
            logger.info("the Kubernetes API answers: %d pods match", len(pods))
        self.connected = True
        self._table.replace(pods)
        self._sync()

    def _event(self, kind: str, pod: Mapping[str, Any]) -> None:
        self._table.apply(kind, pod)
        self._sync()

    def _lost_sight(self, reason: str) -> None:
        if self.connected or not self._table.by_url():
            logger.warning("the Kubernetes API cannot be followed, the last view stays: %s", reason)
        self.connected = False

    def _sync(self) -> None:
        wanted = self._table.by_url()
        for url in self.urls() - wanted.keys():
            self.remove(url, "its pod is gone")
        for url, pod in wanted.items():
            self.add(url, role=pod.role, identity=pod.uid, barred=pod.problem)


def _shown(error: Exception) -> str:
    if isinstance(error, client.ApiException):
        return f"{error.status} {error.reason}"
    return f"{type(error).__name__}: {error}"

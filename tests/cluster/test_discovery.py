"""The gateway's view of pods on a real API server: what is there, what goes, cut watches, old versions, outages.

The pods are objects that no node runs; what they point at are HTTP servers that answer as workers do.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from services.gateway import pod_cluster
from services.gateway.pod_cluster import PodApi, PodCluster
from services.gateway.worker_client import WorkerClient
from tests.cluster.api import Object
from tests.cluster.conftest import Cluster
from tests.cluster.kubelet import wait
from tests.support.described_worker import until, worker

SECRET = "a secret for tests only"
SELECTOR = "app=workers,kvbaton.io/role in (prefill,decode)"
WITHIN_S = 20.0
IMAGE = {"name": "worker", "image": "none"}


class Namespace:
    """Pod objects in a namespace of their own, and the credentials of an account that may see them."""

    def __init__(self, cluster: Cluster, name: str, folder: Path) -> None:
        self.api, self.name, self.folder = cluster.plane.api, name, folder
        self.path = f"/api/v1/namespaces/{name}/pods"

    def add(self, name: str, role: str, url: str, *, app: str = "workers", is_ready: bool = True) -> Object:
        host, _, port = url.removeprefix("http://").rpartition(":")
        container = IMAGE | {"ports": [{"name": "http", "containerPort": int(port)}]}
        labels = {"app": app, "kvbaton.io/role": role}
        body = {"metadata": {"name": name, "labels": labels}, "spec": {"containers": [container]}}
        # Bound to a node that nobody plays: nothing but the test changes it.
        body["spec"] |= {"nodeName": "nobody", "automountServiceAccountToken": False}
        pod = self.api.create(self.path, body)
        self.set_ready(name, is_ready, host)
        return pod

    def set_ready(self, name: str, is_ready: bool, host: str = "127.0.0.1") -> None:
        conditions = [{"type": "Ready", "status": str(is_ready)}]
        status = {"phase": "Running", "podIP": host, "podIPs": [{"ip": host}], "conditions": conditions}
        self.api.patch(f"{self.path}/{name}/status", {"status": status})

    def leave(self, name: str) -> None:
        """Being deleted, as long as nothing ends it."""
        self.api.delete(f"{self.path}/{name}", {"gracePeriodSeconds": 3600})

    def remove(self, name: str) -> None:
        self.api.delete(f"{self.path}/{name}", {"gracePeriodSeconds": 0})


@contextmanager
def namespace(cluster: Cluster, name: str, folder: Path) -> Iterator[Namespace]:
    api = cluster.plane.api
    api.create("/api/v1/namespaces", {"metadata": {"name": name}})
    rbac = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{name}"
    rule = {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]}
    api.create(f"{rbac}/roles", {"metadata": {"name": "see-pods"}, "rules": [rule]})
    subject = {"kind": "ServiceAccount", "name": "viewer", "namespace": name}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "see-pods"}
    api.create(f"{rbac}/rolebindings", {"metadata": {"name": "see-pods"}, "subjects": [subject], "roleRef": role})
    accounts = f"/api/v1/namespaces/{name}/serviceaccounts"
    api.create(accounts, {"metadata": {"name": "viewer"}})
    token = api.create(f"{accounts}/viewer/token", {"spec": {"expirationSeconds": 3600}})["status"]["token"]
    folder.mkdir()
    (folder / "token").write_text(token)
    (folder / "ca.crt").write_text(api.ca_file.read_text())
    wait(lambda: api.find(f"{accounts}/default"), WITHIN_S, "the namespace has its service account")
    yield Namespace(cluster, name, folder)
    api.delete(f"/api/v1/namespaces/{name}")


@asynccontextmanager
async def following(cluster: Cluster, where: Namespace, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[PodCluster]:
    host, _, port = cluster.plane.api.url.removeprefix("https://").rpartition(":")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", port)
    client = WorkerClient(SECRET, keepalive_s=5, connect_timeout_s=2, info_timeout_s=2, max_connections=8)
    view = PodCluster(where.name, SELECTOR, where.folder, client, poll_s=0.2, lost_after_s=2)
    view.start()
    try:
        yield view
    finally:
        await view.close()
        await client.close()


def urls(view: PodCluster) -> set[str]:
    return {worker.url for worker in view.workers()}


@pytest.fixture
def serving(cluster: Cluster, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Namespace]:
    name = re.sub(r"[^a-z]+", "-", request.node.name.removeprefix("test_"))[-50:].strip("-")
    with namespace(cluster, name, tmp_path / "credentials") as made:
        yield made


async def test_pods_come_are_barred_and_go(
    cluster: Cluster, serving: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with worker("prefill") as (prefill, _), worker("decode") as (first, _), worker("decode") as (second, _):
        serving.add("p", "prefill", prefill)
        serving.add("d1", "decode", first, is_ready=False)
        async with following(cluster, serving, monkeypatch) as view:
            await until(lambda: prefill in urls(view), "the prefill pod is used")
            serving.add("d2", "decode", second)
            await until(lambda: urls(view) == {prefill, second}, "a pod that is not Ready gives way to one that is")
            serving.set_ready("d1", True)
            await until(lambda: urls(view) == {prefill, first, second}, "a pod became Ready")
            serving.leave("d2")
            await until(lambda: urls(view) == {prefill, first}, "a pod that is being deleted is given no new work")
            lost: list[str] = []
            (held,) = [worker for worker in view.workers() if worker.url == first]
            view.assign(held, lost.append)
            serving.remove("d1")
            await until(lambda: lost == ["its pod is gone"], "whoever waits for it is told")
            serving.remove("d2")
            await until(lambda: urls(view) == {prefill}, "both are gone")


async def test_a_pod_that_leaves_is_used_until_another_one_is_there(
    cluster: Cluster, serving: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with worker("decode") as (old, _), worker("decode") as (new, new_says):
        new_says["state"] = "loading"
        serving.add("old", "decode", old)
        async with following(cluster, serving, monkeypatch) as view:
            await until(lambda: urls(view) == {old}, "the old pod is used")
            serving.add("new", "decode", new)
            serving.leave("old")
            await until(lambda: any("deleted" in (w["problem"] or "") for w in view.describe()), "the deletion is seen")
            assert urls(view) == {old}, "there is no other that says it is ready"
            new_says["state"] = "ready"
            await until(lambda: urls(view) == {new}, "the new one has taken over")


async def test_what_a_worker_says_of_its_role_must_be_what_its_label_says(
    cluster: Cluster, serving: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with worker("decode") as (url, _):
        serving.add("liar", "prefill", url)
        async with following(cluster, serving, monkeypatch) as view:
            await until(lambda: any("its label says" in (w["problem"] or "") for w in view.describe()), "it is seen")
            assert view.workers() == []


async def test_other_namespaces_and_other_selectors_are_not_seen(
    cluster: Cluster, serving: Namespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with worker("decode") as (ours, _), worker("decode") as (theirs, _):
        with namespace(cluster, "somebody-else", tmp_path / "other") as other:
            other.add("d", "decode", theirs)
            serving.add("unlabelled", "decode", theirs, app="other")
            serving.add("d", "decode", ours)
            async with following(cluster, serving, monkeypatch) as view:
                await until(lambda: urls(view) == {ours}, "ours is used")
                other.add("d2", "decode", theirs)
                serving.set_ready("d", False)
                await until(lambda: any("not Ready" in (w["problem"] or "") for w in view.describe()), "an event came")
                assert {worker["url"] for worker in view.describe()} == {ours}


async def test_a_new_pod_at_an_old_address_is_another_worker(
    cluster: Cluster, serving: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with worker("decode") as (url, _):
        serving.add("first", "decode", url)
        async with following(cluster, serving, monkeypatch) as view:
            await until(lambda: urls(view) == {url}, "the first is used")
            lost: list[str] = []
            view.assign(view.workers()[0], lost.append)
            serving.leave("first")
            serving.add("second", "decode", url)
            await until(lambda: lost == ["another worker has its address"], "the first one's requests go elsewhere")
            await until(lambda: urls(view) == {url}, "the second is used")


async def test_the_view_stays_through_an_outage_and_follows_again(
    cluster: Cluster, serving: Namespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with worker("decode") as (first, _), worker("decode") as (second, _):
        serving.add("d1", "decode", first)
        async with following(cluster, serving, monkeypatch) as view:
            await until(lambda: urls(view) == {first}, "the pod is used")
            await asyncio.to_thread(cluster.plane.stop_program, "kube-apiserver")
            await until(lambda: not view.connected, "the outage is seen")
            assert urls(view) == {first}
            await asyncio.to_thread(cluster.plane.start_api_server)
            serving.add("d2", "decode", second)
            await until(lambda: urls(view) == {first, second}, "what happened meanwhile is seen")
    assert sum("the last view stays" in record.message for record in caplog.records) == 1, "said once"


async def test_a_watch_that_ends_goes_on_without_a_new_list(
    cluster: Cluster, serving: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pod_cluster, "WATCH_S", 1)
    lists: list[int] = []
    watches: list[str] = []
    list_pods, watch = PodApi.list, PodApi.watch
    monkeypatch.setattr(PodApi, "list", lambda self: (lists.append(1), list_pods(self))[1])
    monkeypatch.setattr(PodApi, "watch", lambda self, version: (watches.append(version), watch(self, version))[1])
    async with worker("decode") as (url, _), following(cluster, serving, monkeypatch) as view:
        await until(lambda: len(watches) >= 3, "the watch was begun again and again")
        serving.add("d", "decode", url)
        await until(lambda: urls(view) == {url}, "an event of a later watch")
        assert len(lists) == 1


@pytest.mark.parametrize("how", ["status", "event"])
async def test_a_version_that_is_too_old_leads_to_a_new_list(
    cluster: Cluster, serving: Namespace, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The API says 410 Gone as the status of the answer, or as an event within it."""
    from kubernetes.client import ApiException

    watch, refused = PodApi.watch, []

    def once_gone(self: PodApi, version: str) -> Any:
        if refused:
            return watch(self, version)
        refused.append(version)
        if how == "status":
            raise ApiException(status=410, reason="Gone")
        return iter([("ERROR", {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"})])

    monkeypatch.setattr(PodApi, "watch", once_gone)
    async with worker("decode") as (url, _), following(cluster, serving, monkeypatch) as view:
        await until(lambda: refused, "the first watch was refused")
        serving.add("d", "decode", url)
        await until(lambda: urls(view) == {url}, "it lists and follows again")


async def test_the_api_itself_refuses_a_version_that_is_too_old(
    cluster: Cluster, serving: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the answer to 410 is tested with is what a real server says."""
    from kubernetes.client import ApiException

    async with following(cluster, serving, monkeypatch) as view:
        await until(lambda: view.connected, "it lists")
        api = view._api

        def first_event() -> Any:
            try:
                return next(iter(api.watch("1")), None)
            except ApiException as error:
                return error.status

        found = await asyncio.to_thread(first_event)
    assert found == 410 or (found[0] == "ERROR" and found[1]["code"] == 410), json.dumps(str(found))

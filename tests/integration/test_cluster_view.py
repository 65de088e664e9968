"""The gateway's view of workers that discovery adds, bars and removes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.gateway.cluster import PolledCluster, StaticCluster
from services.gateway.worker_client import WorkerClient
from tests.support.described_worker import until, worker


@asynccontextmanager
async def view_of(*urls: str) -> AsyncIterator[PolledCluster]:
    client = WorkerClient(
        "a secret for tests only", keepalive_s=5, connect_timeout_s=2, info_timeout_s=2, max_connections=8
    )
    view = StaticCluster(urls, client, poll_s=0.05, lost_after_s=2)
    view.start()
    try:
        yield view
    finally:
        await view.close()
        await client.close()


def urls(view: PolledCluster) -> set[str]:
    return {worker.url for worker in view.workers()}


async def test_a_barred_worker_is_used_only_while_its_role_has_no_other() -> None:
    async with worker("decode") as (old, _), worker("decode") as (new, says), worker("prefill") as (prefill, _):
        says["state"] = "loading"
        async with view_of(prefill) as view:
            view.add(old)
            view.add(new)
            await until(lambda: urls(view) == {prefill, old}, "the new one is still loading")
            view.add(old, barred="its pod is being deleted")
            assert urls(view) == {prefill, old}
            says["state"] = "ready"
            await until(lambda: urls(view) == {prefill, new}, "the new one has taken over")
            view.add(old)
            await until(lambda: urls(view) == {prefill, old, new}, "nothing bars it any more")


async def test_who_waits_for_a_removed_worker_is_told_and_so_is_who_comes_too_late() -> None:
    async with worker("decode") as (url, _), view_of(url) as view:
        await until(lambda: urls(view) == {url}, "it is used")
        chosen = view.workers()[0]
        told: list[str] = []
        view.assign(chosen, told.append)
        view.remove(url, "its pod is gone")
        assert told == ["its pod is gone"]
        end = view.assign(chosen, told.append)
        await until(lambda: len(told) == 2, "the late one is told as well")
        end()


async def test_another_identity_at_the_same_url_is_another_worker() -> None:
    async with worker("decode") as (url, _), view_of() as view:
        view.add(url, identity="first")
        await until(lambda: urls(view) == {url}, "the first is used")
        told: list[str] = []
        view.assign(view.workers()[0], told.append)
        view.add(url, identity="second")
        assert told == ["another worker has its address"]
        assert urls(view) == set(), "the second has not been asked yet"
        await until(lambda: urls(view) == {url}, "the second is used")


async def test_a_worker_of_another_role_than_discovery_says_is_not_used() -> None:
    async with worker("decode") as (url, _), view_of() as view:
        view.add(url, role="prefill")
        await until(lambda: "its label says prefill" in str(view.describe()[0]["problem"]), "it is refused")
        assert view.workers() == []

"""What a Pod object says of a worker."""

from typing import Any

import pytest

from services.gateway.pods import PodTable, read_pod


def pod(uid: str = "u1", *, role: str = "decode", ip: str | None = "10.1.2.3", ready: bool = True, **more: Any) -> Any:
    metadata: dict[str, Any] = {"uid": uid, "name": f"pod-{uid}", "labels": {"kvbaton.io/role": role}}
    metadata |= more.pop("metadata", {})
    ports = [{"name": "fabric", "containerPort": 13337}, {"name": "http", "containerPort": 8100}]
    status = {"phase": "Running", "conditions": [{"type": "Ready", "status": str(ready)}]}
    status |= {"podIP": ip} if ip else {}
    return {"metadata": metadata, "spec": {"containers": [{"ports": ports}]}, "status": status | more}


def test_a_ready_pod_may_be_given_work_at_its_http_port() -> None:
    read = read_pod(pod())
    assert read is not None
    assert (read.url, read.role, read.problem) == ("http://10.1.2.3:8100", "decode", "")


def test_an_ipv6_address_is_put_in_brackets() -> None:
    read = read_pod(pod(ip="fd00::5"))
    assert read is not None
    assert read.url == "http://[fd00::5]:8100"


@pytest.mark.parametrize(
    ("which", "problem"),
    [
        (pod(ready=False), "its pod is not Ready"),
        (pod(conditions=None), "its pod is not Ready"),
        (pod(metadata={"deletionTimestamp": "2026-01-01T00:00:00Z"}), "its pod is being deleted"),
    ],
)
def test_a_pod_that_is_to_be_given_no_work_is_still_known(which: Any, problem: str) -> None:
    read = read_pod(which)
    assert read is not None
    assert read.problem == problem


@pytest.mark.parametrize(
    "which",
    [
        pod(ip=None),
        pod(phase="Failed"),
        pod(phase="Succeeded"),
        pod(role="gateway"),
        pod(metadata={"labels": None}),
        pod() | {"spec": {"containers": [{"ports": None}]}},
        {"metadata": {"uid": "u", "name": "n"}},
    ],
)
def test_a_pod_that_serves_nobody_is_none(which: Any) -> None:
    assert read_pod(which) is None


def test_only_annotations_of_ours_are_kept() -> None:
    read = read_pod(pod(metadata={"annotations": {"kvbaton.io/model": "m", "other.io/x": "y"}}))
    assert read is not None
    assert read.annotations == {"kvbaton.io/model": "m"}


def test_a_list_replaces_what_was_known_and_events_change_it() -> None:
    table = PodTable()
    table.replace([pod("a"), pod("b", ip="10.1.2.4")])
    table.apply("MODIFIED", pod("b", ip="10.1.2.4", ready=False))
    table.apply("ADDED", pod("c", ip="10.1.2.5"))
    assert {url: p.problem for url, p in table.by_url().items()} == {
        "http://10.1.2.3:8100": "",
        "http://10.1.2.4:8100": "its pod is not Ready",
        "http://10.1.2.5:8100": "",
    }
    table.apply("DELETED", pod("c", ip="10.1.2.5"))
    table.replace([pod("b", ip="10.1.2.4")])
    assert set(table.by_url()) == {"http://10.1.2.4:8100"}


def test_a_pod_that_loses_its_address_is_gone() -> None:
    table = PodTable()
    table.replace([pod("a")])
    table.apply("MODIFIED", pod("a", ip=None))
    assert table.by_url() == {}


@pytest.mark.parametrize("order", [("old", "new"), ("new", "old")])
def test_of_two_pods_with_one_address_the_usable_one_counts(order: tuple[str, str]) -> None:
    """The address of a pod that ends is given to the next one before its object is gone."""
    leaving = {"deletionTimestamp": "2026-01-01T00:00:00Z"}
    pods = {"old": pod("old", metadata=leaving), "new": pod("new")}
    table = PodTable()
    table.replace([pods[name] for name in order])
    assert table.by_url()["http://10.1.2.3:8100"].uid == "new"

"""A release from install to uninstall on a real control plane. The tests are one story, in this order."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from tests.cluster.api import Object
from tests.cluster.conftest import MODEL, NAMESPACE, NODES, Cluster, merged
from tests.cluster.kubelet import wait
from tests.cluster.load import Load
from tests.cluster.services import is_ready

pytestmark = pytest.mark.timeout(900)
SETTLE_S = 60.0


def say(text: str) -> None:
    print(text, flush=True)


@contextmanager
def under_load(cluster: Cluster, during: str) -> Iterator[Load]:
    """No request may fail, and some must have been answered."""
    load = Load(cluster.url, MODEL)
    load.start()
    try:
        wait(lambda: load.num_answered >= 3 or load.failures, SETTLE_S, "the load runs")
        yield load
        so_far = load.num_answered
        wait(lambda: load.num_answered >= so_far + 3 or load.failures, SETTLE_S, "the load goes on")
    finally:
        load.stop()
        say(load.report(during))
        for failure in load.failures[:10]:
            say(f"  {failure}")
    assert load.failures == []


def transferred_bytes(cluster: Cluster) -> float:
    """Of all gateways that are there."""
    total = 0.0
    for pod in cluster.pods("gateway"):
        text = httpx.get(f"http://{pod['status']['podIP']}:8001/metrics", timeout=10).text
        found = re.search(r"^kvbaton_gateway_transfer_bytes_total (\S+)", text, re.MULTILINE)
        total += float(found.group(1)) if found else 0.0
    return total


def names(pods: list[Object]) -> set[str]:
    return {pod["metadata"]["name"] for pod in pods}


def round_of(number: int) -> Object:
    """Values that roll every pod."""
    return {role: {"annotations": {"round": str(number)}} for role in ("gateway", "prefill", "decode")}


def test_a_install_serves_a_chat(cluster: Cluster) -> None:
    began = time.monotonic()
    notes = cluster.helm("install")
    assert "no PodDisruptionBudgets were made" in notes, "this server is older than policy/v1"
    cluster.wait_rolled_out()
    say(f"helm install: all pods ready after {time.monotonic() - began:.0f} s")
    body = {
        "model": MODEL,
        "max_tokens": 24,
        "temperature": 0,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
    }
    response = httpx.post(f"{cluster.url}/v1/chat/completions", json=body, timeout=120)
    assert response.status_code == 200, response.text
    answer = response.json()["choices"][0]["message"]["content"]
    say(f"chat answer: {answer!r}")
    assert "Paris" in answer


def test_b_processes_run_as_the_user_that_admission_gave_them(cluster: Cluster) -> None:
    for pod in cluster.pods():
        container = pod["spec"]["containers"][0]
        assert container["securityContext"]["runAsUser"] == 1000650000
        log = cluster.run("kubectl", "logs", pod["metadata"]["name"])
        assert "Traceback" not in log, log


def test_c_kv_moved_between_the_pods(cluster: Cluster) -> None:
    assert transferred_bytes(cluster) > 0
    workers = httpx.get(f"{cluster.admin_url}/debug/cluster", timeout=10).json()["workers"]
    assert {worker["info"]["role"] for worker in workers if worker["usable"]} == {"prefill", "decode"}
    assert {worker["pod"]["name"] for worker in workers} == names([*cluster.pods("prefill"), *cluster.pods("decode")])
    say(f"KV bytes moved so far: {transferred_bytes(cluster):.0f}")


def test_d_helm_test_says_which_lane_carried_kv(cluster: Cluster) -> None:
    output = cluster.run("helm4", "test", "kvbaton", "--logs", "--timeout", "180s")
    found = re.search(r"KV moved: (\d+) bytes in .* over (\S.*)", output)
    assert found, output
    say(f"helm test: {found.group(0)}")
    assert int(found.group(1)) > 0
    assert "tcp" in found.group(2)


def test_e_upgrade_under_load_fails_no_request(cluster: Cluster) -> None:
    before = names(cluster.pods())
    with under_load(cluster, "helm upgrade"):
        cluster.helm("upgrade", values=round_of(2))
        cluster.wait_rolled_out()
    after = names(pod for pod in cluster.pods() if "check" not in pod["metadata"]["name"])
    assert not before & after, "every pod was replaced"
    assert transferred_bytes(cluster) > 0, "the new pods ship KV"


def test_f_the_secret_outlives_an_upgrade(cluster: Cluster) -> None:
    path = f"/api/v1/namespaces/{NAMESPACE}/secrets/kvbaton-secret"
    before = cluster.plane.api.get(path)["data"]
    cluster.helm("upgrade", values=round_of(2))
    assert cluster.plane.api.get(path)["data"] == before


def test_g_rollback_under_load_fails_no_request(cluster: Cluster) -> None:
    with under_load(cluster, "helm rollback"):
        cluster.run("helm4", "rollback", "kvbaton", "1", "--wait", "--timeout", "420s")
        cluster.wait_rolled_out()
    assert all("round" not in pod["metadata"].get("annotations", {}) for pod in cluster.pods())


def test_h_pools_are_scaled_with_kubectl(cluster: Cluster) -> None:
    with under_load(cluster, "scaling up"):
        for role in ("prefill", "decode"):
            cluster.run("kubectl", "scale", f"deployment/kvbaton-{role}", "--replicas=2")
        cluster.run("kubectl", "scale", "deployment/kvbaton-gateway", "--replicas=2")
        cluster.wait_rolled_out()
    wait(lambda: _num_usable(cluster) == 4, SETTLE_S, "the gateway uses all four workers")
    nodes = {pod["spec"]["nodeName"] for pod in cluster.pods("decode")}
    assert nodes == set(NODES), "the two decode workers are spread over the nodes"


def test_i_a_deleted_pod_fails_no_request(cluster: Cluster) -> None:
    with under_load(cluster, "pod deletion"):
        for role in ("decode", "prefill", "gateway"):
            victim = cluster.pods(role)[0]["metadata"]["name"]
            cluster.run("kubectl", "delete", "pod", victim, "--wait=true", "--timeout=120s")
            say(f"deleted {victim}")
        cluster.wait_rolled_out()


def test_j_a_killed_worker_comes_back_and_fails_no_request(cluster: Cluster) -> None:
    with under_load(cluster, "a kill -9 of a decode worker"):
        pod = cluster.pods("decode")[0]
        runner = cluster.kubelet.find(NAMESPACE, pod["metadata"]["name"])
        assert runner is not None
        process = runner.containers[0]._process
        assert process is not None
        process.kill()
        wait(lambda: runner.containers[0].restarts == 1 and runner.containers[0].ready, 120, "the worker is back")


def test_k_an_outage_of_the_api_fails_no_request(cluster: Cluster) -> None:
    with under_load(cluster, "an outage of the Kubernetes API") as load:
        cluster.plane.stop_program("kube-apiserver")
        so_far = load.num_answered
        wait(lambda: load.num_answered >= so_far + 5 or load.failures, 2 * SETTLE_S, "requests without the API")
        cluster.plane.start_api_server()
    wait(lambda: len(cluster.pods()) >= 6, SETTLE_S, "the API is back")


def test_l_a_drained_node_fails_no_request(cluster: Cluster) -> None:
    cluster.wait_rolled_out()
    with under_load(cluster, "node drain"):
        cluster.run("kubectl", "drain", NODES[0], "--ignore-daemonsets", "--delete-emptydir-data", "--force",
                    "--timeout=300s")  # fmt: skip
        cluster.wait_rolled_out()
    assert {pod["spec"]["nodeName"] for pod in cluster.pods() if is_ready(pod)} == {NODES[1]}
    cluster.run("kubectl", "uncordon", NODES[0])


def test_m_scaled_down_pools_fail_no_request(cluster: Cluster) -> None:
    with under_load(cluster, "scaling down"):
        for role in ("gateway", "prefill", "decode"):
            cluster.run("kubectl", "scale", f"deployment/kvbaton-{role}", "--replicas=1")
        cluster.wait_rolled_out()


def test_n_an_upgrade_leaves_the_size_of_a_pool_that_another_scales(cluster: Cluster) -> None:
    external = {"prefill": {"scaler": "external"}}
    cluster.helm("upgrade", values=external)
    cluster.run("kubectl", "scale", "deployment/kvbaton-prefill", "--replicas=2")
    cluster.wait_rolled_out()
    cluster.helm("upgrade", values=merged(external, {"decode": {"annotations": {"round": "4"}}}))
    deployment = cluster.plane.api.get(f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/kvbaton-prefill")
    assert deployment["spec"]["replicas"] == 2


def test_z_uninstall_leaves_nothing(cluster: Cluster) -> None:
    cluster.run("helm4", "uninstall", "kvbaton", "--wait", "--timeout", "180s")
    kinds = "deployments,replicasets,services,configmaps,secrets,serviceaccounts,roles,rolebindings,pods"

    def left() -> list[str]:
        listed = json.loads(cluster.run("kubectl", "get", kinds, "-o", "json"))["items"]
        names = [f"{thing['kind']}/{thing['metadata']['name']}" for thing in listed]
        return [name for name in names if "kvbaton" in name and not name.endswith("-check")]

    wait(lambda: not left(), 120, "nothing is left")
    say("helm uninstall: nothing is left")


def _num_usable(cluster: Cluster) -> int:
    workers = httpx.get(f"{cluster.admin_url}/debug/cluster", timeout=10).json()["workers"]
    return sum(worker["usable"] for worker in workers)

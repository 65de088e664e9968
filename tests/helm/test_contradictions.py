"""Values that contradict themselves are refused with a sentence, and misspelt ones by the schema."""

import pytest

from tests.support.chart import MODEL, Helm

GPU = {"resource": "example.com/gpu", "count": 1}
CONTRADICTIONS = {
    "no model": ({}, "model.uri is empty"),
    "unknown scheme": ({"model": {"uri": "s3://bucket"}}, "expected builtin://, pvc://"),
    "path that goes up": ({"model": {"uri": "pvc://claim/../etc"}}, "must not go up"),
    "token for nothing": (
        {"model": {"uri": "pvc://m", "tokenSecret": "t"}}, "nothing would use the token"),
    "grace": ({"decode": {"terminationGracePeriodSeconds": 60}}, "must be more than preStopSeconds + drainSeconds"),
    "rollout": ({"gateway": {"rollout": {"maxSurge": 0, "maxUnavailable": 0}}}, "no rollout could ever go on"),
    "rollout of a pool": ({"decode": {"rollout": {"maxSurge": 0}}}, "no rollout could ever go on"),
    "reserved setting": ({"decode": {"settings": {"listen": "x"}}}, "the chart sets this one itself"),
    "gpu without resource": ({"prefill": {"gpu": {"count": 1}}}, "name the resource as your device plugin does"),
    "gpu without count": ({"prefill": {"gpu": {"resource": "a/b"}}}, "say how many a replica gets"),
    "gpu twice": (
        {"prefill": {"gpu": GPU | {"dra": {"deviceClassName": "c"}}}}, "from the device plugin or from a resource"),
    "gpu on cpu": ({"prefill": {"gpu": GPU, "device": "cpu"}}, "device is cpu and the pod asks for a GPU"),
    "cuda without gpu": ({"prefill": {"device": "cuda"}}, "the pod asks for no GPU"),
    "shared without size": ({"prefill": {"gpu": GPU | {"shared": True}}}, "set prefill.kvCacheGiB"),
    "gpu in resources": (
        {"prefill": {"gpu": GPU, "resources": {"limits": {"example.com/gpu": 1}}}}, "say it once, as prefill.gpu"),
    "fabric in resources": (
        {"fabric": {"resources": {"rdma/ib": 1}}, "decode": {"resources": {"limits": {"rdma/ib": 1}}}},
        "say it once, as fabric.resources"),
    "planner without image": ({"planner": {"enabled": True}}, "has no planner command yet"),
    "planner of one pool": (
        {"planner": {"enabled": True, "image": {"repository": "x"}}, "decode": {"scaler": "chart"}},
        "a pool has one owner"),
    "planned by nobody": ({"decode": {"scaler": "planner"}}, "nobody would set the number of replicas"),
    "port range": ({"fabric": {"portRange": "3000-2000"}}, "expected FIRST-LAST"),
    "policy without port": (
        {"fabric": {"port": 0}, "networkPolicy": {"enabled": True}}, "cannot name a port that is picked"),
    "port range twice": ({"fabric": {"env": {"UCX_TCP_PORT_RANGE": "1-2"}}}, "set fabric.portRange"),
    "ports": ({"gateway": {"adminPort": 8000}}, "belongs on no public port"),
    "fabric port": ({"decode": {"port": 13337}}, "decode.port and fabric.port are both 13337"),
    "scc for nothing": ({"openshift": {"scc": {"create": True}}}, "only workers with RDMA devices"),
    "no parents": ({"httpRoute": {"enabled": True}}, "httpRoute.parentRefs is empty"),
    "no picker": ({"inferencePool": {"enabled": True}}, "needs the Service of an endpoint picker"),
    "quantity": ({"fabric": {"shmSize": "1Gi"}, "decode": {"resources": {"limits": {"memory": "4 GB"}}}},
                 "cannot read the quantity"),
}  # fmt: skip


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_contradiction_is_refused_with_a_sentence(helm: Helm, name: str) -> None:
    values, sentence = CONTRADICTIONS[name]
    values = (
        values if name in ("no model", "unknown scheme", "path that goes up", "token for nothing") else MODEL | values
    )
    assert sentence in helm.refusal(values)


MISSPELT = {
    "top level": {"gatway": {}},
    "in a pool": {"decode": {"kvcacheGiB": 1}},
    "shm at the wrong level": {"decode": {"shmSize": "1Gi"}},
    "strategy at the wrong level": {"decode": {"strategy": {"maxSurge": 1}}},
    "type": {"decode": {"replicas": "two"}},
    "negative": {"decode": {"replicas": -1}},
    "choice": {"decode": {"scaler": "hpa"}},
    "profile": {"profile": "gpu"},
    "env name": {"decode": {"env": {"A-B": "1"}}},
    "setting name": {"decode": {"settings": {"--listen": "1"}}},
    "digest": {"image": {"digest": "latest"}},
}


@pytest.mark.parametrize("name", MISSPELT)
def test_a_misspelt_or_misplaced_value_is_refused_by_the_schema(helm: Helm, name: str) -> None:
    assert "values don't meet the specifications of the schema" in helm.refusal(MODEL | MISSPELT[name])


@pytest.mark.parametrize(
    ("values", "api"),
    [
        ({"route": {"enabled": True}}, "route.openshift.io/v1"),
        ({"httpRoute": {"enabled": True, "parentRefs": [{"name": "g"}]}}, "gateway.networking.k8s.io/v1"),
        ({"monitoring": {"prometheusRule": {"enabled": True}}}, "monitoring.coreos.com/v1"),
        ({"inferencePool": {"enabled": True, "endpointPicker": {"name": "p"}}}, "inference.networking.k8s.io/v1"),
    ],
)
def test_what_the_cluster_has_no_api_for_is_refused(helm: Helm, values: dict, api: str) -> None:
    assert f"needs the API {api}, which this cluster does not have" in helm.refusal(MODEL | values, apis=["policy/v1"])

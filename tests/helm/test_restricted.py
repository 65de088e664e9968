"""Every pod runs under OpenShift's restricted-v2: no root, no fixed user, no host, no capability, declared volumes."""

import pytest

from tests.support.chart import CASES, Helm, containers, pod_specs

VOLUMES = frozenset({
    "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "image", "persistentVolumeClaim", "projected", "secret",
})  # fmt: skip
HOME_VARIABLES = ("HOME", "USER", "TMPDIR", "XDG_CACHE_HOME", "HF_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
NUMBERS_OF_USERS = ("runAsUser", "runAsGroup", "fsGroup", "supplementalGroups")


@pytest.mark.parametrize("name", CASES)
def test_every_pod_passes_restricted_v2(helm: Helm, name: str) -> None:
    for pod, spec in pod_specs(helm.render(CASES[name], kube="1.35.0")):
        with_ipc_lock = name == "everything" and pod in ("kvbaton-prefill", "kvbaton-decode")
        check_pod(spec)
        for container in containers(spec):
            check_container(container, allowed={"IPC_LOCK"} if with_ipc_lock else set())


def check_pod(spec: dict) -> None:
    assert not any(spec.get(field) for field in ("hostNetwork", "hostPID", "hostIPC"))
    assert spec["automountServiceAccountToken"] is False
    context = spec["securityContext"]
    assert context["runAsNonRoot"] is True
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not any(number in context for number in NUMBERS_OF_USERS)
    for volume in spec.get("volumes", []):
        assert set(volume) - {"name"} <= VOLUMES


def check_container(container: dict, allowed: set[str]) -> None:
    context = container["securityContext"]
    assert context["allowPrivilegeEscalation"] is False
    assert context["privileged"] is False
    assert context["runAsNonRoot"] is True
    assert context["capabilities"]["drop"] == ["ALL"]
    assert set(context["capabilities"].get("add", [])) <= allowed
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not any(number in context for number in NUMBERS_OF_USERS)
    for port in container.get("ports", []):
        assert "hostPort" not in port
        assert port["containerPort"] > 1024


def test_the_opt_in_scc_and_nothing_else_adds_ipc_lock(helm: Helm) -> None:
    def added(values: dict) -> set[str]:
        specs = [spec for _, spec in pod_specs(helm.render(values))]
        return {c for s in specs for k in containers(s) for c in k["securityContext"]["capabilities"].get("add", [])}

    assert added(CASES["h200-rdma"]) == set()
    assert added(CASES["everything"]) == {"IPC_LOCK"}
    assert added(CASES["h200-rdma"] | {"openshift": {"scc": {"name": "of-ours"}}}) == {"IPC_LOCK"}


@pytest.mark.parametrize("name", CASES)
def test_whatever_is_written_goes_to_a_declared_volume(helm: Helm, name: str) -> None:
    for pod, spec in pod_specs(helm.render(CASES[name], kube="1.35.0")):
        if not pod.endswith(("-gateway", "-prefill", "-decode")):
            continue
        writable = {volume["name"] for volume in spec["volumes"] if "emptyDir" in volume}
        for container in containers(spec):
            if container["name"] == "memlock":
                continue
            environ = {variable["name"]: variable.get("value", "") for variable in container["env"]}
            mounts = [mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] in writable]
            for variable in HOME_VARIABLES:
                where = environ[variable]
                assert variable == "USER" or any(where == m or where.startswith(m + "/") for m in mounts), variable


def test_the_root_is_writable_on_gpu_pods_only(helm: Helm) -> None:
    for name, values in CASES.items():
        for pod, spec in pod_specs(helm.render(values, kube="1.35.0")):
            for container in spec["containers"]:
                requests = str(container.get("resources", {}))
                has_gpu = "nvidia.com" in requests or "claims" in requests
                assert container["securityContext"]["readOnlyRootFilesystem"] is not has_gpu, (name, pod)

"""The chart renders over values, versions and APIs, and what it renders says what the values say."""

import json

import pytest
import yaml

from tests.support.chart import CASES, CHART, MODEL, PROFILES, Helm, containers, find, pod_specs

NEWEST = "1.37.0"
DEMO = {"profile": "cpu-demo"}


def _worker(docs: list[dict], role: str) -> dict:
    (container,) = find(docs, "Deployment", f"kvbaton-{role}")["spec"]["template"]["spec"]["containers"]
    return container


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("openshift", "everything")])
def test_lint_finds_no_fault(helm: Helm, name: str) -> None:
    """The two cases left out need APIs, which lint cannot be told of; all are rendered elsewhere."""
    flags = ["--strict", "--kube-version", NEWEST, "--values", "-"]
    done = helm.run("lint", str(CHART), *flags, input=yaml.safe_dump(CASES[name]))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("profile", PROFILES)
def test_a_profile_by_name_is_its_file_of_values(helm: Helm, profile: str) -> None:
    model = MODEL if profile != "cpu-demo" else {}
    by_name = helm.render(model | {"profile": profile, "auth": {"existingSecret": "s"}})
    by_file = helm.render(model | {"auth": {"existingSecret": "s"}}, "--values", str(CHART / f"values-{profile}.yaml"))
    assert by_name == by_file


def test_a_value_wins_over_the_profile(helm: Helm) -> None:
    docs = helm.render(DEMO | {"decode": {"kvCacheGiB": 0.5, "replicas": 3}})
    assert "--kv-cache-gib=0.5" in _worker(docs, "decode")["args"]
    assert "--kv-cache-gib=0.25" in _worker(docs, "prefill")["args"]
    assert find(docs, "Deployment", "kvbaton-decode")["spec"]["replicas"] == 3


def test_both_helms_render_the_same(helm4: Helm) -> None:
    values = CASES["everything"] | {"auth": {"existingSecret": "s"}}
    helm3 = Helm(helm4.program.with_name("helm3"))

    def in_order(helm: Helm) -> list[str]:
        return sorted(json.dumps(doc, sort_keys=True) for doc in helm.render(values))

    assert in_order(helm3) == in_order(helm4)


@pytest.mark.parametrize(("name", "owned"), [("everything", False), ("external scaler", False), ("cpu-demo", True)])
def test_replicas_are_rendered_only_for_pools_that_the_chart_owns(helm: Helm, name: str, owned: bool) -> None:
    docs = helm.render(CASES[name])
    for role in ("prefill", "decode"):
        assert ("replicas" in find(docs, "Deployment", f"kvbaton-{role}")["spec"]) is owned


def test_no_vendor_is_built_in() -> None:
    sources = [*CHART.glob("templates/**/*.*"), CHART / "values.yaml"]
    lines = [line for path in sources for line in path.read_text().splitlines() if "nvidia.com/" in line]
    assert all(line.lstrip().startswith("resource:") or "for example" in line for line in lines), lines


def test_gpus_go_by_the_name_given(helm: Helm) -> None:
    docs = helm.render(MODEL | {"decode": {"gpu": {"resource": "amd.com/gpu", "count": 2}}})
    assert _worker(docs, "decode")["resources"] == {"requests": {"amd.com/gpu": 2}, "limits": {"amd.com/gpu": 2}}
    assert "--device=cuda" in _worker(docs, "decode")["args"]
    assert _worker(docs, "decode")["securityContext"]["readOnlyRootFilesystem"] is False
    assert "--device=cpu" in _worker(docs, "prefill")["args"]
    assert _worker(docs, "prefill")["securityContext"]["readOnlyRootFilesystem"] is True


def test_gpu_pools_give_a_gpu_back_before_they_take_one(helm: Helm) -> None:
    docs = helm.render(CASES["mig"])
    for role in ("prefill", "decode"):
        strategy = find(docs, "Deployment", f"kvbaton-{role}")["spec"]["strategy"]
        assert strategy["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    demo = find(helm.render(DEMO), "Deployment", "kvbaton-decode")["spec"]["strategy"]
    assert demo["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}


def test_shared_memory_is_in_the_memory_limit(helm: Helm) -> None:
    resources = {"requests": {"memory": "1.5Gi"}, "limits": {"memory": 4000000000}}
    docs = helm.render(MODEL | {"fabric": {"shmSize": "1Gi"}, "decode": {"resources": resources}})
    found = _worker(docs, "decode")["resources"]
    assert found["requests"]["memory"] == "2560Mi"
    assert found["limits"]["memory"] == "4839Mi"  # 4e9 bytes are 3814.7 Mi
    spec = find(docs, "Deployment", "kvbaton-decode")["spec"]["template"]["spec"]
    (shm,) = [volume for volume in spec["volumes"] if volume["name"] == "shm"]
    assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": "1Gi"}
    assert {"name": "shm", "mountPath": "/dev/shm"} in _worker(docs, "decode")["volumeMounts"]


def test_grace_is_longer_than_leaving_and_drain(helm: Helm) -> None:
    docs = helm.render(DEMO | {"gateway": {"drainSeconds": 100, "leaveSeconds": 7}})
    for role in ("gateway", "prefill", "decode"):
        spec = find(docs, "Deployment", f"kvbaton-{role}")["spec"]["template"]["spec"]
        (container,) = spec["containers"]
        flags = dict(arg.removeprefix("--").partition("=")[::2] for arg in container["args"])
        before = flags["leave-s"] if role == "gateway" else container["lifecycle"]["preStop"]["exec"]["command"][1]
        assert spec["terminationGracePeriodSeconds"] > int(flags["drain-s"]) + int(before)


def test_liveness_asks_what_a_loading_worker_answers_and_startup_has_half_an_hour(helm: Helm) -> None:
    for role in ("prefill", "decode"):
        worker = _worker(helm.render(DEMO), role)
        assert worker["livenessProbe"]["httpGet"]["path"] == "/health"
        assert worker["readinessProbe"]["httpGet"]["path"] == "/ready"
        startup = worker["startupProbe"]
        assert startup["httpGet"]["path"] == "/ready"
        assert startup["periodSeconds"] * startup["failureThreshold"] >= 1800


@pytest.mark.parametrize("value", [1234567890, 0.0001, True, "a: b", "-x", '"', "{{ .Release.Name }}", "#1", "yes"])
def test_odd_values_reach_the_pod_as_they_are(helm: Helm, value: object) -> None:
    docs = helm.render(
        DEMO | {"decode": {"env": {"ODD": value}, "labels": {"mine": "1"}, "annotations": {"note": "1.0"}}}
    )
    text = {True: "true"}.get(value, str(value)) if not isinstance(value, float) else "0.0001"
    assert {"name": "ODD", "value": text} in _worker(docs, "decode")["env"]
    metadata = find(docs, "Deployment", "kvbaton-decode")["spec"]["template"]["metadata"]
    assert metadata["labels"]["mine"] == "1"
    assert metadata["annotations"]["note"] == "1.0"


def test_settings_become_flags(helm: Helm) -> None:
    settings = {"max-staging-bytes": 4294967296, "prefix-caching": False, "cores": [0, 2], "log-level": "debug"}
    args = _worker(helm.render(DEMO | {"decode": {"settings": settings}}), "decode")["args"]
    assert {"--max-staging-bytes=4294967296", "--no-prefix-caching", "--cores=0,2", "--log-level=debug"} <= set(args)


@pytest.mark.parametrize(
    "release", ["kvbaton", "a", "My.Release".lower(), "r" * 53, "trailing-" + "x" * 30 + "-kvbaton"]
)
def test_names_are_dns_labels_for_every_release(helm: Helm, release: str) -> None:
    docs = helm.render(CASES["everything"], release=release)
    names = [doc["metadata"]["name"] for doc in docs]
    assert all(len(name) <= 63 and name == name.strip("-.") for name in names)
    assert len({(doc["kind"], doc["metadata"]["name"]) for doc in docs}) == len(docs)
    labels = [str(value) for doc in docs for value in doc["metadata"].get("labels", {}).values()]
    assert all(len(value) <= 63 for value in labels)


def test_two_releases_in_one_namespace_do_not_select_each_others_pods(helm: Helm) -> None:
    ours, theirs = (find(helm.render(DEMO, release=name), "Deployment", f"{name}-kvbaton-gateway") for name in "ab")
    selector = ours["spec"]["selector"]["matchLabels"]
    assert not selector.items() <= theirs["spec"]["template"]["metadata"]["labels"].items()
    (flag,) = [arg for arg in _args(ours) if arg.startswith("--worker-selector=")]
    assert "app.kubernetes.io/instance=a" in flag


def _args(deployment: dict) -> list[str]:
    return deployment["spec"]["template"]["spec"]["containers"][0]["args"]


def test_a_pods_role_is_one_thing_in_label_and_argument(helm: Helm) -> None:
    for role in ("gateway", "prefill", "decode"):
        deployment = find(helm.render(DEMO), "Deployment", f"kvbaton-{role}")
        assert deployment["spec"]["template"]["metadata"]["labels"]["kvbaton.io/role"] == role == _args(deployment)[0]


def test_labels_of_the_user_do_not_break_discovery(helm: Helm) -> None:
    docs = helm.render(DEMO | {"decode": {"labels": {"kvbaton.io/role": "prefill"}}})
    metadata = find(docs, "Deployment", "kvbaton-decode")["spec"]["template"]["metadata"]
    assert metadata["labels"]["kvbaton.io/role"] == "decode"


def test_ucx_ports_are_pinned_and_allowed_between_workers(helm: Helm) -> None:
    docs = helm.render(MODEL | {"networkPolicy": {"enabled": True}, "fabric": {"portRange": "21000-21009"}})
    environ = {variable["name"]: variable.get("value") for variable in _worker(docs, "prefill")["env"]}
    assert environ["UCX_TCP_PORT_RANGE"] == "21000-21009"
    policy = find(docs, "NetworkPolicy", "kvbaton-workers")["spec"]
    for rules in (policy["ingress"], policy["egress"]):
        assert any({"port": 21000, "endPort": 21009} in rule["ports"] for rule in rules)
        assert any({"port": 13337} in rule["ports"] for rule in rules)


def test_workers_advertise_the_address_of_their_pod(helm: Helm) -> None:
    for role in ("prefill", "decode"):
        worker = _worker(helm.render(DEMO), role)
        assert "--advertise=$(POD_IP)" in worker["args"]
        (variable,) = [variable for variable in worker["env"] if variable["name"] == "POD_IP"]
        assert variable["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"


@pytest.mark.parametrize(
    ("uri", "path", "name", "volume"),
    [
        ("pvc://claim", "/models", "claim", {"persistentVolumeClaim": {"claimName": "claim", "readOnly": True}}),
        (
            "pvc://claim/a/Llama/",
            "/models/a/Llama",
            "Llama",
            {"persistentVolumeClaim": {"claimName": "claim", "readOnly": True}},
        ),
        (
            "oci://r.example:5000/m/llama:v1",
            "/models",
            "llama",
            {"image": {"reference": "r.example:5000/m/llama:v1", "pullPolicy": "IfNotPresent"}},
        ),
        (
            "oci://r.example/m/llama@sha256:0a//w/x",
            "/models/w/x",
            "x",
            {"image": {"reference": "r.example/m/llama@sha256:0a", "pullPolicy": "IfNotPresent"}},
        ),
        ("hf://org/Model-1.5@v2", "/models/Model-1.5", "Model-1.5", {"emptyDir": {"sizeLimit": "4Gi"}}),
        (
            "builtin://",
            "/models/models/SmolLM2-135M-Instruct",
            "SmolLM2-135M-Instruct",
            {"emptyDir": {"sizeLimit": "4Gi"}},
        ),
    ],
)
def test_every_kind_of_model_is_mounted_where_the_processes_look(
    helm: Helm, uri: str, path: str, name: str, volume: dict
) -> None:
    docs = helm.render({"model": {"uri": uri}})
    for role in ("gateway", "prefill", "decode"):
        spec = find(docs, "Deployment", f"kvbaton-{role}")["spec"]["template"]["spec"]
        args = spec["containers"][0]["args"]
        assert f"--model={path}" in args
        assert f"--served-model-name={name}" in args
        assert {"name": "models"} | volume in spec["volumes"]
        assert bool(spec.get("initContainers")) == uri.startswith(("hf://", "builtin://"))


def test_service_links_are_off_in_every_pod(helm: Helm) -> None:
    assert all(spec["enableServiceLinks"] is False for _, spec in pod_specs(helm.render(CASES["everything"])))


def test_the_route_waits_longer_than_thirty_seconds(helm: Helm) -> None:
    route = find(helm.render(CASES["openshift"]), "Route", "kvbaton")
    assert route["metadata"]["annotations"]["haproxy.router.openshift.io/timeout"] == "600s"


def test_the_planner_may_only_scale_the_two_pools(helm: Helm) -> None:
    rules = find(helm.render(CASES["everything"]), "Role", "kvbaton-planner")["rules"]
    for rule in rules:
        assert "*" not in json.dumps(rule)
        if "deployments" in str(rule["resources"]):
            assert rule["resourceNames"] == ["kvbaton-prefill", "kvbaton-decode"]
        assert not {"delete", "deletecollection", "escalate", "bind"} & set(rule["verbs"])


def test_rdma_pods_check_locked_memory_first(helm: Helm) -> None:
    docs = helm.render(CASES["h200-rdma"])
    for role in ("prefill", "decode"):
        template = find(docs, "Deployment", f"kvbaton-{role}")["spec"]["template"]
        assert template["metadata"]["annotations"]["k8s.v1.cni.cncf.io/networks"] == "ib-sriov"
        assert template["spec"]["initContainers"][0]["name"] == "memlock"
        assert template["spec"]["containers"][0]["resources"]["limits"]["openshift.io/ib_vf"] == 1
    assert "memlock" not in json.dumps(helm.render(DEMO))


def test_a_generated_secret_is_long_and_differs(helm: Helm) -> None:
    demos = (DEMO, DEMO | {"nameOverride": "kvbaton"})
    first, second = (find(helm.render(demo), "Secret", "kvbaton-secret")["data"]["secret"] for demo in demos)
    assert first != second
    assert len(first) >= 64


def test_the_dashboard_is_json_with_the_targets_of_the_values(helm: Helm) -> None:
    docs = helm.render(CASES["everything"] | {"slo": {"ttftSeconds": 0.75, "itlSeconds": 0.05}})
    dashboard = json.loads(find(docs, "ConfigMap", "kvbaton-dashboard")["data"]["kvbaton.json"])
    steps = json.dumps([panel["fieldConfig"]["defaults"].get("thresholds") for panel in dashboard["panels"]])
    assert "0.75" in steps
    assert "0.05" in steps


def test_notes_warn_of_shared_gpus(helm4: Helm) -> None:
    shared = {"gpu": {"resource": "example.com/gpu", "count": 1, "shared": True}, "kvCacheGiB": 4}
    done = helm4.run(
        "install",
        "kvbaton",
        str(CHART),
        "--dry-run=client",
        "--values",
        "-",
        input=yaml.safe_dump(MODEL | {"decode": shared}),
    )
    assert done.returncode == 0, done.stderr
    assert "decode shares its GPU" in done.stdout


def test_every_container_has_requests_in_the_demo(helm: Helm) -> None:
    for name, spec in pod_specs(helm.render(DEMO | {"tests": {"enabled": False}})):
        for container in containers(spec):
            assert container["resources"]["requests"]["memory"], (name, container["name"])

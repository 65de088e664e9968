"""The arguments of every container are ones that the program in it takes: parsed by the real command lines."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from services import cli, settings
from services.check import CheckConfig
from services.gateway.config import GatewayConfig
from services.worker.config import WorkerConfig
from tests.support.chart import CASES, MODEL, Helm, containers, pod_specs

CONFIGS = {"gateway": GatewayConfig, "prefill": WorkerConfig, "decode": WorkerConfig, "check": CheckConfig}


def parse(args: list[str], environ: dict[str, str], secret: Path) -> object:
    """As `kvbaton` does it, the pod's address and secret put in."""
    args = [arg.replace("$(POD_IP)", "10.1.2.3").replace("/etc/kvbaton/secret", str(secret)) for arg in args]
    namespace = cli._parser().parse_args(args)
    if args[0] not in CONFIGS:
        return namespace
    fixed = {"role": args[0]} if CONFIGS[args[0]] is WorkerConfig else {}
    return settings.load(CONFIGS[args[0]], namespace, prog="test", environ=environ, known=cli.ALL_NAMES, **fixed)


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text("a secret for tests only")
    return path


@pytest.mark.parametrize("name", CASES)
def test_every_container_of_ours_starts_with_arguments_that_are_understood(helm: Helm, name: str, secret: Path) -> None:
    seen = set()
    for _, spec in pod_specs(helm.render(CASES[name], kube="1.35.0")):
        for container in containers(spec):
            if container.get("command") == ["kvbaton"]:
                environ = {variable["name"]: variable.get("value", "") for variable in container.get("env", [])}
                parse(container["args"], environ, secret)
                seen.add(container["args"][0])
    assert seen >= {"gateway", "prefill", "decode", "check"}


def test_what_the_cli_does_not_know_would_be_noticed(helm4: Helm, secret: Path) -> None:
    docs = helm4.render(MODEL | {"decode": {"settings": {"max-batch-size": 4}}})
    (args,) = [spec["containers"][0]["args"] for name, spec in pod_specs(docs) if name.endswith("-decode")]
    with pytest.raises(SystemExit):
        parse(args, {}, secret)


def test_the_settings_of_the_values_arrive_typed(helm4: Helm, secret: Path) -> None:
    values = MODEL | {"decode": {"kvCacheGiB": 0.5, "settings": {"max-staging-bytes": 4294967296, "cores": [1, 2]}}}
    (container,) = [s["containers"][0] for name, s in pod_specs(helm4.render(values)) if name.endswith("-decode")]
    config = parse(container["args"], {}, secret)
    assert isinstance(config, WorkerConfig)
    assert (config.kv_cache_gib, config.max_staging_bytes, config.cores) == (0.5, 4294967296, [1, 2])
    assert config.listen == "0.0.0.0:8100"
    assert (config.fabric_listen, config.advertise) == ("0.0.0.0:13337", "10.1.2.3")


def test_the_hub_command_is_understood(helm4: Helm, tmp_path: Path) -> None:
    (init, *_) = [spec for name, spec in pod_specs(helm4.render({"model": {"uri": "hf://some/model@rev"}}))]
    (container,) = init["initContainers"]
    assert container["command"] == ["hf"]
    program = Path(sys.executable).with_name("hf")
    environ = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    args = [arg.replace("/models", str(tmp_path)) for arg in container["args"]]
    done = subprocess.run([program, *args], capture_output=True, text=True, env=environ, timeout=60, check=False)
    assert done.returncode != 2, done.stderr  # 2 is a command line that is not understood
    assert "ffline" in done.stdout + done.stderr

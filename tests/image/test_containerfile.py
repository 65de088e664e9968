"""The Containerfile without an engine to build it: linted, then its steps executed one by one.

`test_the_steps_build_a_working_image` installs the whole image (1 GB or more): it runs with `make test-cluster`, where
KVBATON_IMAGE_STEPS is set. The others need nothing but the checkout.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.chart import CASES, Helm, containers, pod_specs, tools

ROOT = Path(__file__).resolve().parents[2]
CONTAINERFILE = ROOT / "Containerfile"
MOST_BYTES = 3 << 30


@dataclass
class Stage:
    args: dict[str, str] = field(default_factory=dict)
    steps: list[tuple[str, str]] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)


def stages() -> list[Stage]:
    """Instructions by stage, continuation lines joined."""
    text = re.sub(r"\\\n\s*", " ", CONTAINERFILE.read_text())
    found: list[Stage] = []
    for line in text.splitlines():
        word, _, rest = line.partition(" ")
        if word == "FROM":
            found.append(Stage())
        elif not line.strip() or line.startswith("#") or not found:
            continue
        elif word == "ARG":
            name, _, value = rest.partition("=")
            found[-1].args[name] = value
        elif word == "ENV":
            found[-1].env |= dict(pair.split("=", 1) for pair in rest.split())
        else:
            found[-1].steps.append((word, rest))
    return found


def test_hadolint_finds_no_fault() -> None:
    done = subprocess.run(
        [Path(sys.executable).with_name("hadolint"), CONTAINERFILE], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


def test_what_is_copied_is_in_the_repository_and_not_ignored() -> None:
    ignored = (ROOT / ".containerignore").read_text().split()
    for word, rest in stages()[0].steps:
        if word == "COPY":
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists(), source
                assert source.partition("/")[0] not in ignored


def test_the_image_runs_as_no_fixed_user_and_never_as_root() -> None:
    steps = dict(stages()[-1].steps)
    user, _, group = steps["USER"].partition(":")
    assert user.isdigit()
    assert user != "0"
    assert group == "0"
    assert "sudo" not in CONTAINERFILE.read_text()


def test_versions_of_the_image_and_the_chart_are_the_projects() -> None:
    project = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    chart = re.search(r'^appVersion: "(.+)"', (ROOT / "helm" / "kvbaton" / "Chart.yaml").read_text(), re.MULTILINE)
    assert project
    assert chart
    assert stages()[-1].args["VERSION"] == project.group(1) == chart.group(1)


@pytest.mark.skipif("KVBATON_IMAGE_STEPS" not in os.environ, reason="runs with `make test-cluster`: installs 1 GB")
@pytest.mark.timeout(900)
def test_the_steps_build_a_working_image(tmp_path: Path) -> None:
    image = tmp_path / "opt" / "kvbaton"
    source = tmp_path / "src"
    _build(stages()[0], source, image)
    size = sum(path.stat().st_size for path in image.rglob("*") if path.is_file() and not path.is_symlink())
    print(f"image without its base: {size / 2**20:.0f} MiB", flush=True)
    assert size < MOST_BYTES
    _other_users_can_read(image)

    home = tmp_path / "home"
    home.mkdir()
    environ = {"PATH": f"{image}/bin:/usr/bin:/bin", "HOME": str(home), "KVBATON__CACHE_DIR": str(home)}
    for command in _commands_of_the_chart():
        assert shutil.which(command, path=environ["PATH"]), f"the chart starts {command}"
    for role in ("gateway", "prefill", "decode", "check"):
        _run([f"{image}/bin/kvbaton", role, "--help"], environ, home)
    # The image must hold what a worker really loads, from nowhere but itself.
    check = (
        "import torch, ucxx, kubernetes, services.worker.worker, services.gateway.pod_cluster as p; print(p.__file__)"
    )
    assert str(image) in _run([f"{image}/bin/python", "-c", check], environ, home)
    _run([f"{image}/bin/kvbaton", "model", "import"], environ, home)
    assert (home / "models" / "SmolLM2-135M-Instruct" / "config.json").exists()


def _build(stage: Stage, source: Path, image: Path) -> None:
    """The first stage, with its WORKDIR and its result under tmp."""
    source.mkdir()
    for word, rest in stage.steps:
        *sources, target = rest.split()
        if word == "COPY":
            for name in sources:
                where = source / target / Path(name).name if target.endswith("/") else source / target
                where.parent.mkdir(parents=True, exist_ok=True)
                copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
                copy(ROOT / name, where)
        elif word == "RUN":
            # From the index that this machine has; a build takes the one of TORCH_INDEX.
            environ = dict(os.environ) | stage.args | {"TORCH_INDEX": ""}
            command = rest.replace("/opt/kvbaton", str(image))
            done = subprocess.run(["sh", "-ec", command], cwd=source, env=environ, timeout=800, check=False)
            assert done.returncode == 0, command
        else:
            assert word == "WORKDIR", f"a step this test does not know: {word}"


def _other_users_can_read(image: Path) -> None:
    for path in image.rglob("*"):
        if not path.is_symlink():
            assert path.stat().st_mode & 0o004, f"{path} is closed to other users"


def _commands_of_the_chart() -> set[str]:
    helm = Helm(tools() / "helm4")
    found = {"sleep"}
    for values in CASES.values():
        for name, spec in pod_specs(helm.render(values, kube="1.35.0")):
            if not name.endswith("-planner"):
                found |= {container["command"][0] for container in containers(spec)}
    return found


def _run(command: list[str], environ: dict[str, str], cwd: Path) -> str:
    passed_on = {name: text for name, text in os.environ.items() if name.startswith(("PIP_", "SSL_", "http", "HTTP"))}
    done = subprocess.run(
        command, env=passed_on | environ, cwd=cwd, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout

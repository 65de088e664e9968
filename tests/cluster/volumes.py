"""A pod's volumes as folders, and the mapping of its mount paths onto them.

A process has no mount namespace of its own here, so paths under a mount are rewritten in arguments and environment.
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Callable
from pathlib import Path

from tests.cluster.api import Api, Object


class VolumeMissing(Exception):
    """A secret or config map is not there yet: tried again, as a kubelet does."""


def make_volumes(api: Api, pod: Object, folder: Path, owner: tuple[int, int] | None) -> dict[str, Path]:
    """A folder for each volume by name; readable by `owner` (uid, gid). Raises VolumeMissing."""
    made = {}
    for volume in pod["spec"].get("volumes", []):
        path = folder / "volumes" / volume["name"]
        path.mkdir(parents=True, exist_ok=True)
        for name, content in _files(api, pod, volume).items():
            (path / name).write_bytes(content)
        if owner is not None:
            for entry in (path, *path.iterdir()):
                os.chown(entry, *owner)
        made[volume["name"]] = path
    return made


def _files(api: Api, pod: Object, volume: Object) -> dict[str, bytes]:
    namespace = pod["metadata"]["namespace"]
    if "emptyDir" in volume:
        return {}
    if "secret" in volume:
        return _keys(api, namespace, "secrets", volume["secret"]["secretName"], volume["secret"].get("items"))
    if "configMap" in volume:
        return _keys(api, namespace, "configmaps", volume["configMap"]["name"], volume["configMap"].get("items"))
    if "projected" in volume:
        files: dict[str, bytes] = {}
        for source in volume["projected"]["sources"]:
            if "serviceAccountToken" in source:
                files[source["serviceAccountToken"]["path"]] = _token(api, pod, source["serviceAccountToken"]).encode()
            else:
                files |= _files(api, pod, {"name": volume["name"], **source})
        return files
    raise AssertionError(f"a volume that this kubelet does not know: {volume}")


def _keys(api: Api, namespace: str, kind: str, name: str, items: list[Object] | None) -> dict[str, bytes]:
    found = api.find(f"/api/v1/namespaces/{namespace}/{kind}/{name}")
    if found is None:
        raise VolumeMissing(f"{kind} {name} does not exist")
    data = found.get("data") or {}
    content = {key: base64.b64decode(text) if kind == "secrets" else text.encode() for key, text in data.items()}
    if items is None:
        return content
    return {item["path"]: content[item["key"]] for item in items}


def _token(api: Api, pod: Object, source: Object) -> str:
    metadata = pod["metadata"]
    account = pod["spec"].get("serviceAccountName", "default")
    bound = {"kind": "Pod", "apiVersion": "v1", "name": metadata["name"], "uid": metadata["uid"]}
    wanted = {"expirationSeconds": source.get("expirationSeconds", 3600), "boundObjectRef": bound}
    path = f"/api/v1/namespaces/{metadata['namespace']}/serviceaccounts/{account}/token"
    token: str = api.create(path, {"spec": wanted})["status"]["token"]
    return token


def path_mapping(container: Object, volumes: dict[str, Path]) -> Callable[[str], str]:
    """Rewrites every path under a mount of this container to where its volume lies."""
    mounts = {mount["mountPath"].rstrip("/"): volumes[mount["name"]] for mount in container.get("volumeMounts", [])}
    mounts.pop("/dev/shm", None)  # the machine's own
    if not mounts:
        return lambda text: text
    longest_first = sorted(mounts, key=len, reverse=True)
    pattern = re.compile(r"(?<![\w/.-])(" + "|".join(map(re.escape, longest_first)) + r")(?![\w.-])")
    return lambda text: pattern.sub(lambda match: str(mounts[match.group(1)]), text)

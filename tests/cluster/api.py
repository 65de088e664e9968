"""The Kubernetes API as JSON over HTTP: what the process kubelet and the tests need of it. Blocking, thread-safe."""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

Object = dict[str, Any]
MERGE = {"content-type": "application/merge-patch+json"}
WATCH_S = 60


class Api:
    def __init__(self, url: str, token: str, ca_file: Path) -> None:
        """The server's certificate is checked against `ca_file`."""
        self.url, self.token, self.ca_file = url, token, ca_file
        headers = {"authorization": f"Bearer {token}"}
        limits = httpx.Limits(max_connections=200)
        self._http = httpx.Client(base_url=url, headers=headers, verify=_trusting(ca_file), timeout=30, limits=limits)

    def get(self, path: str, **query: Any) -> Object:
        return self._answer(self._http.get(path, params=query))

    def find(self, path: str) -> Object | None:
        response = self._http.get(path)
        return None if response.status_code == 404 else self._answer(response)

    def create(self, path: str, body: Object) -> Object:
        return self._answer(self._http.post(path, json=body))

    def patch(self, path: str, body: Object) -> Object:
        return self._answer(self._http.patch(path, content=json.dumps(body), headers=MERGE))

    def delete(self, path: str, body: Object | None = None) -> None:
        response = self._http.request("DELETE", path, json=body)
        if response.status_code not in (404, 409):
            self._answer(response)

    def follow(self, path: str, **query: Any) -> Iterator[tuple[str, Object]]:
        """Objects as ("LISTED", whole list) and then each event, for ever: a watch that ends begins with a list."""
        while True:
            listed = self.get(path, **query)
            yield "LISTED", listed
            version = listed["metadata"]["resourceVersion"]
            options = query | {"watch": "1", "resourceVersion": version, "timeoutSeconds": str(WATCH_S)}
            with self._http.stream("GET", path, params=options, timeout=WATCH_S + 15) as response:
                for line in response.iter_lines():
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        break
                    yield event["type"], event["object"]

    def is_ready(self) -> bool:
        try:
            return self._http.get("/readyz").status_code == 200
        except httpx.HTTPError:
            return False

    def close(self) -> None:
        self._http.close()

    @staticmethod
    def _answer(response: httpx.Response) -> Object:
        if response.is_error:
            raise RuntimeError(f"{response.request.method} {response.request.url}: {response.text[:500]}")
        answer: Object = response.json()
        return answer


def _trusting(ca_file: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(ca_file))

"""One container as a local process: started, probed, restarted with back-off, stopped with preStop and grace."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.cluster.api import Object
from tests.cluster.as_user import as_user

TICK_S = 0.1
FIRST_BACK_OFF_S = 10.0
LONGEST_BACK_OFF_S = 300.0


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass
class Probe:
    """Of one kind; `result` is None until it has been asked often enough to say."""

    spec: Object
    next_at: float
    successes: int = 0
    failures: int = 0
    last_problem: str = ""

    def ask(self, host: str, ports: Mapping[str, int]) -> bool | None:
        """True or False once a threshold is reached, None before."""
        problem = self._problem(host, ports)
        self.next_at = time.monotonic() + self.spec.get("periodSeconds", 10)
        if problem:
            self.successes, self.failures, self.last_problem = 0, self.failures + 1, problem
            return False if self.failures >= self.spec.get("failureThreshold", 3) else None
        self.failures, self.successes = 0, self.successes + 1
        return True if self.successes >= self.spec.get("successThreshold", 1) else None

    def _problem(self, host: str, ports: Mapping[str, int]) -> str:
        get = self.spec["httpGet"]
        port = ports[get["port"]] if isinstance(get["port"], str) else get["port"]
        connection = http.client.HTTPConnection(host, port, timeout=self.spec.get("timeoutSeconds", 1))
        try:
            connection.request("GET", get.get("path", "/"))
            status = connection.getresponse().status
        except (OSError, http.client.HTTPException) as error:
            return f"{type(error).__name__}: {error}"
        finally:
            connection.close()
        return "" if 200 <= status < 400 else f"HTTP status {status}"


@dataclass
class Surroundings:
    """What a pod gives its containers."""

    address: str
    environ: Callable[[Object], dict[str, str]]
    rewrite: Callable[[Object], Callable[[str], str]]
    """Mount paths and names of services, for this container."""
    log: Callable[[str], Path]
    user: int | None
    cwd: Path
    event: Callable[[str, str], None]
    """Reason and message."""
    changed: Callable[[], None]
    back_off_s: float = FIRST_BACK_OFF_S


@dataclass
class Container:
    spec: Object
    around: Surroundings
    restart_policy: str
    is_init: bool = False
    state: Object = field(default_factory=lambda: {"waiting": {"reason": "PodInitializing"}})
    last_state: Object = field(default_factory=dict)
    ready: bool = False
    started: bool = False
    restarts: int = 0
    done: bool = False
    """It has ended for good."""
    exit_code: int | None = None
    _process: subprocess.Popen[bytes] | None = None
    _stop: threading.Event = field(default_factory=threading.Event)
    _grace_s: float = 30.0

    @property
    def name(self) -> str:
        name: str = self.spec["name"]
        return name

    def run(self) -> None:
        """Until it has ended for good, or was stopped. On a thread of its own."""
        wait_s = self.around.back_off_s
        while not self._stop.is_set():
            started_at = time.monotonic()
            self.exit_code = self._run_once()
            if self._stop.is_set() or self.restart_policy == "Never" or (self._finished_well()):
                break
            if time.monotonic() - started_at > 600:
                wait_s = self.around.back_off_s
            self.restarts += 1
            self.state, self.last_state = {"waiting": {"reason": "CrashLoopBackOff"}}, self.state
            self.around.event("BackOff", f"back-off {wait_s:.0f} s, container {self.name} ended with {self.exit_code}")
            self.around.changed()
            self._stop.wait(wait_s)
            wait_s = min(2 * wait_s, LONGEST_BACK_OFF_S)
        self.done = True
        self.around.changed()

    def stop(self, grace_s: float) -> None:
        """preStop, SIGTERM, and SIGKILL once the grace is over."""
        self._grace_s = grace_s
        self._stop.set()

    def kill(self) -> None:
        self.stop(0)
        if self._process is not None and self._process.poll() is None:
            _kill(self._process)

    def status(self) -> Object:
        return {
            "name": self.name,
            "image": self.spec["image"],
            "imageID": "process",
            "containerID": f"process://{self._process.pid}" if self._process else "",
            "ready": self.ready or (self.is_init and self.exit_code == 0),
            "started": self.started,
            "restartCount": self.restarts,
            "state": self.state,
            "lastState": self.last_state,
        }

    def _finished_well(self) -> bool:
        return self.exit_code == 0 and (self.is_init or self.restart_policy == "OnFailure")

    def _run_once(self) -> int:
        """From start to end; returns the exit status."""
        with self.around.log(self.name).open("ab") as log:
            try:
                process = self._process = self._start(log)
            except OSError as error:
                log.write(f"cannot start: {error}\n".encode())
                self.state = _terminated(128, "StartError", now())
                return 128
        began = now()
        self.state = {"running": {"startedAt": began}}
        self.around.changed()
        self._probe_until_end(process)
        self.ready = self.started = False
        code = process.wait()
        code = 128 - code if code < 0 else code
        self.state = _terminated(code, "Completed" if code == 0 else "Error", began)
        self.around.changed()
        return code

    def _start(self, log: Any) -> subprocess.Popen[bytes]:
        environ = self.around.environ(self.spec)
        rewrite = self.around.rewrite(self.spec)
        words = [*self.spec.get("command", []), *self.spec.get("args", [])]
        command = [rewrite(expand(word, environ)) for word in words]
        # In a network namespace of its own "all interfaces" is the pod's address.
        command = [re.sub(r"0\.0\.0\.0(?=:\d)", self.around.address, word) for word in command]
        # This machine's own paths stay: the checkout may lie below a folder where the pod mounts something, as /tmp.
        own = {variable["name"] for variable in self.spec.get("env", [])}
        environ = {name: rewrite(text) if name in own else text for name, text in environ.items()}
        program = shutil.which(command[0], path=environ["PATH"]) or command[0]
        command = [program, *command[1:]]
        if self.around.user is not None:
            command = as_user(self.around.user, command, self.around.cwd / "mounts")
        return subprocess.Popen(
            command,
            env=environ,
            cwd=self.around.cwd,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )

    def _probe_until_end(self, process: subprocess.Popen[bytes]) -> None:
        probes = {
            kind: Probe(
                self.spec[f"{kind}Probe"], time.monotonic() + self.spec[f"{kind}Probe"].get("initialDelaySeconds", 0)
            )
            for kind in ("startup", "readiness", "liveness")
            if f"{kind}Probe" in self.spec
        }
        self.started = "startup" not in probes
        self.ready = self.started and "readiness" not in probes and not self.is_init
        stopping = False
        while process.poll() is None:
            if self._stop.is_set() and not stopping:
                stopping = True
                threading.Thread(target=self._end, args=(process,), daemon=True).start()
            if not stopping:
                self._probe(process, probes)
            time.sleep(TICK_S)

    def _probe(self, process: subprocess.Popen[bytes], probes: dict[str, Probe]) -> None:
        kinds = ("readiness", "liveness") if self.started else ("startup",)
        ports = {port["name"]: port["containerPort"] for port in self.spec.get("ports", []) if "name" in port}
        for kind in kinds:
            probe = probes.get(kind)
            if probe is None or time.monotonic() < probe.next_at:
                continue
            result = probe.ask(self.around.address, ports)
            if result is None:
                continue
            if kind == "startup" and result:
                self.started = True
                self.ready = "readiness" not in probes
                self.around.changed()
            elif kind == "readiness" and result != self.ready:
                self.ready = result
                self.around.changed()
            elif kind != "readiness" and not result:
                self.around.event("Unhealthy", f"{kind} probe of {self.name}: {probe.last_problem}: killed")
                probes.clear()
                threading.Thread(target=self._end, args=(process,), daemon=True).start()
                return

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """A kubelet's order: preStop and the process's own end share the grace."""
        deadline = time.monotonic() + self._grace_s
        hook = self.spec.get("lifecycle", {}).get("preStop", {}).get("exec")
        if hook and self._grace_s:
            environ = self.around.environ(self.spec)
            try:
                subprocess.run(hook["command"], env=environ, timeout=self._grace_s, check=False)
            except (OSError, subprocess.TimeoutExpired) as error:
                self.around.event("FailedPreStopHook", str(error))
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.around.event("Killing", f"{self.name} did not end within its grace: killed")
                _kill(process)


def expand(text: str, environ: Mapping[str, str]) -> str:
    """$(NAME) as the API's reference says: unknown names stay, $$ is a dollar sign."""

    def value(match: re.Match[str]) -> str:
        return "$" if match.group(0) == "$$" else environ.get(match.group(1), match.group(0))

    return re.sub(r"\$\$|\$\(([A-Za-z_.-][\w.-]*)\)", value, text)


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _terminated(code: int, reason: str, began: str) -> Object:
    return {"terminated": {"exitCode": code, "reason": reason, "startedAt": began, "finishedAt": now()}}

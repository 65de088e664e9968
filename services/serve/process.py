"""One child process: started with its death tied to ours, its last lines kept for when it crashes."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence

KEPT_LINES = 20
MAX_LINE_BYTES = 1 << 16
_PR_SET_PDEATHSIG = 1


class ChildProcess:
    """`name` prefixes its log lines. `on_line` sees each line of its standard output and error."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        environ: Mapping[str, str],
        on_line: Callable[[str, str], None],
    ) -> None:
        self.name = name
        self.last_lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._arguments = [sys.executable, "-m", "services.cli", *arguments]
        self._environ = dict(environ)
        self._on_line = on_line
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *self._arguments,
            env=self._environ,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            limit=MAX_LINE_BYTES,
            start_new_session=True,  # Ctrl-C goes to the supervisor alone, which stops the children in order
            preexec_fn=_die_with(os.getpid()),
        )
        self._reader = asyncio.create_task(self._read_lines(self._process.stdout))

    async def wait(self) -> int:
        """The exit status, once every line has been read."""
        assert self._process is not None
        status = await self._process.wait()
        if self._reader is not None:
            await self._reader
        return status

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    async def stop(self, timeout_s: float) -> None:
        """SIGTERM, then SIGKILL after `timeout_s`. Returns when the process is gone."""
        if self._process is None:
            return
        self.terminate()
        try:
            await asyncio.wait_for(self._process.wait(), timeout_s)
        except TimeoutError:
            self._signal(signal.SIGKILL)
        await self.wait()

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    async def _read_lines(self, stream: asyncio.StreamReader | None) -> None:
        assert stream is not None
        while True:
            try:
                line = await stream.readline()
            except ValueError:  # a line over the limit: the rest of it follows as further lines
                continue
            if not line:
                return
            text = line.decode("utf-8", "replace").rstrip()
            self.last_lines.append(text)
            self._on_line(self.name, text)


def _die_with(parent: int) -> Callable[[], None]:
    """Runs in the child before exec: a killed supervisor leaves nothing behind (Linux, prctl(2))."""

    def prepare() -> None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # the parent died before the call
            os._exit(1)

    return prepare

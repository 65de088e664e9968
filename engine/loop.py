"""The engine thread: the only one that touches the engine, its pool and its tensors.

Commands come in through one queue, from any thread. A turn takes the commands that are there, runs one step, and
hands out their events. With nothing to compute the thread blocks on the queue; it never polls.

    started -> running -> stopped    stop() was called
                       -> failed     an exception; EngineFailed was the last event
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

from engine.engine import Engine
from engine.errors import EngineDead
from engine.messages import Abort, Command, EngineFailed, Event, LedgerSnapshot, Release

logger = logging.getLogger(__name__)


class EngineThread:
    def __init__(
        self,
        engine: Engine,
        on_events: Callable[[list[Event]], None],
        clock: Callable[[], float] = time.monotonic,
        before_step: Callable[[], None] | None = None,
    ) -> None:
        """`on_events` runs on the engine thread, once for the commands of a turn and once for its step, never
        with an empty list. It must hand the events over and return. `before_step` runs there before each step:
        tests delay it."""
        self._engine = engine
        self._on_events = on_events
        self._clock = clock
        self._before_step = before_step
        self._commands: SimpleQueue[Command | None] = SimpleQueue()
        self._ledger = engine.ledger()
        self._turn_began: float | None = None
        self._stuck_since: float | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, command: Command) -> None:
        """Thread-safe, never blocks. Raises EngineDead once the thread has ended, except for Abort and Release,
        which are ignored then as they are for any request that has ended."""
        if not self._ended.is_set():
            self._commands.put(command)
        elif not isinstance(command, Abort | Release):
            raise EngineDead("the engine has ended")

    def stop(self, timeout_s: float) -> bool:
        """End the thread after the step it is in; what is still queued is dropped. False: it has not ended yet.
        Thread-safe, may be called twice."""
        self._commands.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def ledger(self) -> LedgerSnapshot:
        """As of the end of the last turn. Thread-safe: the snapshot is immutable and swapped whole."""
        return self._ledger

    def progress(self) -> tuple[float, float]:
        """Seconds that the turn which is under way has taken, and seconds that requests have been waiting while none
        was running; 0 where there is no such thing. A rising value is a fault. Thread-safe."""
        now = self._clock()
        turn_began, stuck_since = self._turn_began, self._stuck_since
        return _since(turn_began, now), _since(stuck_since, now)

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except Exception as error:
            logger.exception("the engine failed")
            self._ended.set()
            self._on_events([EngineFailed(f"{type(error).__name__}: {error}")])
        finally:
            self._ended.set()

    def _turn(self) -> bool:
        """False: stop."""
        commands = self._take()
        if commands is None:
            return False
        self._turn_began = self._clock()
        events = [event for command in commands for event in self._engine.handle(command, self._clock())]
        self._publish(events)
        if self._engine.has_work():
            if self._before_step is not None:
                self._before_step()
            self._publish(self._engine.step(self._clock))
        elif self._engine.is_empty():
            self._engine.check_integrity()
        self._turn_began = None
        return True

    def _take(self) -> list[Command] | None:
        """The commands that are there now, at least one if there is nothing to compute. None: stop. Those that keep
        coming meanwhile do not keep a step from running."""
        commands: list[Command] = []
        wanted = self._commands.qsize() if self._engine.has_work() else max(1, self._commands.qsize())
        while len(commands) < wanted:
            command = self._commands.get()
            if command is None:
                return None
            commands.append(command)
        return commands

    def _publish(self, events: list[Event]) -> None:
        """The ledger first: whoever acts on an event finds it there."""
        ledger = self._ledger = self._engine.ledger()
        if ledger.requests["waiting"] and not ledger.requests["running"]:
            self._stuck_since = self._clock() if self._stuck_since is None else self._stuck_since
        else:
            self._stuck_since = None
        if events:
            self._on_events(events)


def _since(began: float | None, now: float) -> float:
    return 0.0 if began is None else now - began

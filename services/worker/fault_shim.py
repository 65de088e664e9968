"""The fault shim of a worker that was started with --test-faults: faults of the fabric, and pauses of the engine.

    pause:step:3:0.5     the third step of the engine from now on begins half a second late; `*` is every one

Everything else is as in transport.faults. Never on without that setting.
"""

from __future__ import annotations

import threading
import time
from collections import Counter

from transport.faults import FaultyPlane, parse_faults
from transport.plane import Plane


class FaultShim:
    """`set` on the event loop; `before_step` on the engine thread."""

    def __init__(self, faults: str) -> None:
        self._plane: FaultyPlane | None = None
        self._lock = threading.Lock()
        self._pauses: dict[int | None, float] = {}
        self._num_steps = 0
        self._num_paused = 0
        self._fabric = ""
        self.set(faults)

    def wrap(self, plane: Plane) -> Plane:
        self._plane = FaultyPlane(plane, self._fabric)
        return self._plane

    def set(self, faults: str) -> None:
        """In place of those that were; counting starts anew. Raises ValueError, which names the part at fault."""
        parts = [part.strip() for part in faults.split(",") if part.strip()]
        pauses = dict(_pause(part) for part in parts if part.startswith("pause:"))
        fabric = ",".join(part for part in parts if not part.startswith("pause:"))
        parse_faults(fabric)
        with self._lock:
            self._pauses, self._num_steps, self._num_paused = pauses, 0, 0
        self._fabric = fabric
        if self._plane is not None:
            self._plane.set(fabric)

    def injected(self) -> dict[str, int]:
        fabric = self._plane.injected if self._plane is not None else Counter[str]()
        return {**fabric, "pause:step": self._num_paused}

    def before_step(self) -> None:
        with self._lock:
            self._num_steps += 1
            seconds = self._pauses.get(self._num_steps, self._pauses.get(None, 0.0))
            self._num_paused += seconds > 0
        if seconds:
            time.sleep(seconds)


def _pause(text: str) -> tuple[int | None, float]:
    try:
        _, what, number, seconds = text.split(":")
        if what != "step":
            raise ValueError(what)
        return None if number == "*" else int(number), float(seconds)
    except ValueError as error:
        raise ValueError(f"not a fault: {text!r}") from error

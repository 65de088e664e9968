"""One random schedule of faults. Pure: the same seed and number give the same schedule."""

from __future__ import annotations

import random
from dataclasses import dataclass

_ACTIONS = ("drop", "duplicate", "corrupt", "delay", "fail")
_SENT_BY = {
    "prefill": ("open", "segment", "segment", "segment", "commit", "renew", "abort", "hello"),
    "decode": ("ack", "resend", "alive", "abort", "hello-reply"),
}
EVENTS = (None,) * 80 + ("stop",) * 10 + ("kill",) * 5 + ("drain",) * 5


@dataclass(frozen=True)
class Event:
    """Befalls one worker in the middle of the schedule."""

    what: str
    worker: int
    after_events: int
    """So many events of all streams together come first."""
    seconds: float
    """How long a stopped worker stays so."""


@dataclass(frozen=True)
class Schedule:
    number: int
    faults: tuple[str, ...]
    """One a worker."""
    requests: tuple[int, ...]
    leave_after: tuple[int | None, ...]
    """One a request: the client goes after so many events."""
    event: Event | None


def make_schedule(seed: int, number: int, roles: list[str], num_texts: int) -> Schedule:
    rng = random.Random(f"{seed}/{number}")
    num_requests = rng.randint(2, 5)
    what = rng.choice(EVENTS)
    event = None
    if what is not None:
        event = Event(what, rng.randrange(len(roles)), rng.randint(0, 40), rng.choice((0.1, 0.5, 2.5)))
    return Schedule(
        number=number,
        faults=tuple(_faults(rng, role) for role in roles),
        requests=tuple(rng.randrange(num_texts) for _ in range(num_requests)),
        leave_after=tuple(rng.randint(1, 30) if rng.random() < 0.2 else None for _ in range(num_requests)),
        event=event,
    )


def _faults(rng: random.Random, role: str) -> str:
    faults = [_fault(rng, role) for _ in range(rng.choice((0, 0, 1, 1, 2, 3)))]
    if rng.random() < 0.15:
        faults.append(f"pause:step:{rng.randint(1, 20)}:{rng.choice((0.05, 0.3, 1.0))}")
    return ",".join(faults)


def _fault(rng: random.Random, role: str) -> str:
    action, kind = rng.choice(_ACTIONS), rng.choice(_SENT_BY[role])
    # Now and then every message of a kind: what bounds the repeats has to hold.
    number = "*" if rng.random() < 0.05 else str(rng.randint(1, 4))
    return f"{action}:{kind}:{number}" + (f":{rng.choice((0.02, 0.2, 1.2))}" if action == "delay" else "")

"""Which workers a request goes to. Pure: what is known of the workers goes in, a route comes out.

A decode (or both) worker is always needed; a prefill worker only to be spared the prompt, and only one whose KV
means the same to that decode worker.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from services.protocol import WorkerInfo


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker that answered when it was last asked, and is ready."""

    url: str
    info: WorkerInfo
    num_assigned: int = 0
    """Requests of this gateway that are on it now."""
    num_assigned_then: int = 0
    """The same when the worker described itself."""

    @property
    def load(self) -> int:
        """What it said may be a second old: only the requests of others are taken from that."""
        return max(0, self.info.num_requests - self.num_assigned_then) + self.num_assigned


@dataclass(frozen=True, slots=True)
class Route:
    decode: WorkerView | None
    """None: one token is wanted, and prefill makes it."""
    prefill: WorkerView | None
    """None: decode computes the prompt itself."""
    why_local: str = ""


@dataclass(frozen=True, slots=True)
class NoRoute:
    reason: str
    all_busy: bool
    """Workers that fit are there, and all have just said that they are busy."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What one attempt asks of its workers."""

    num_computed_tokens: int
    """Prompt, and output that an earlier attempt has made."""
    num_total_tokens: int
    """Prompt and all the output there may be."""
    one_token: bool = False
    """Only one more output token is wanted."""
    near: str = ""
    """Incarnation of the decode worker that has the prompt's KV already: asked first."""


def choose(
    workers: Sequence[WorkerView],
    needs: Needs,
    *,
    avoid: Collection[str] = (),
    busy: Collection[str] = (),
) -> Route | NoRoute:
    """`avoid` and `busy` are incarnations: the first have failed this request, the second just had no room.

    A prefill worker that failed is not used again; a decode worker is, when there is no other.
    """
    prefills = [
        worker
        for worker in workers
        if worker.info.role == "prefill"
        and worker.info.incarnation not in avoid
        and worker.info.capacity_tokens >= needs.num_computed_tokens
    ]
    if needs.one_token and prefills:
        return _least_loaded_prefill(prefills, busy)
    fitting = [
        worker
        for worker in workers
        if worker.info.role != "prefill" and worker.info.capacity_tokens >= needs.num_total_tokens
    ]
    decodes = [worker for worker in fitting if worker.info.incarnation not in avoid] or fitting
    if not decodes:
        return NoRoute("no decode worker that can hold this request is ready", all_busy=False)
    return _pair(sorted(_free(decodes, busy), key=lambda worker: _decode_order(worker, needs.near)), prefills, busy)


def choose_successor(
    workers: Sequence[WorkerView], needs: Needs, source: WorkerView, *, busy: Collection[str] = ()
) -> WorkerView | None:
    """The worker that takes over a stream, with its KV, from `source`, which is being stopped."""
    fitting = [
        worker
        for worker in _free(workers, busy)
        if worker.info.role != "prefill"
        and worker.info.incarnation != source.info.incarnation
        and worker.info.capacity_tokens >= needs.num_total_tokens
        and _difference(source, worker) is None
    ]
    return min(fitting, key=_decode_order, default=None)


def _least_loaded_prefill(prefills: Sequence[WorkerView], busy: Collection[str]) -> Route | NoRoute:
    free = _free(prefills, busy)
    if not free:
        return NoRoute("every prefill worker is busy", all_busy=True)
    return Route(None, min(free, key=_prefill_order))


def _pair(decodes: Sequence[WorkerView], prefills: Sequence[WorkerView], busy: Collection[str]) -> Route | NoRoute:
    """`decodes` in the order in which they are to be asked."""
    for decode in decodes:
        if decode.info.role == "both":
            return Route(decode, None, "the worker serves whole requests")
        matching = [worker for worker in prefills if _difference(worker, decode) is None]
        if not matching:
            return Route(decode, None, why_unpaired(prefills, decode))
        if free := _free(matching, busy):
            return Route(decode, min(free, key=_prefill_order))
    return NoRoute("every worker is busy", all_busy=True)


def why_unpaired(prefills: Iterable[WorkerView], decode: WorkerView) -> str:
    """Why none of these prefill workers can ship KV to this decode worker; names the field that differs."""
    differences = sorted({_difference(worker, decode) or "" for worker in prefills} - {""})
    if not differences:
        return "no prefill worker is there"
    return f"no prefill worker matches: {', '.join(differences)} differs"


def longest_request(workers: Iterable[WorkerView]) -> int:
    """Most tokens, prompt and output together, that any ready decode side can hold; 0 when none is there."""
    return max((worker.info.capacity_tokens for worker in workers if worker.info.role != "prefill"), default=0)


def _difference(prefill: WorkerView, decode: WorkerView) -> str | None:
    if prefill.info.fingerprint is None or decode.info.fingerprint is None:
        return "fingerprint"
    return decode.info.fingerprint.difference(prefill.info.fingerprint)


def _free(workers: Iterable[WorkerView], busy: Collection[str]) -> list[WorkerView]:
    return [worker for worker in workers if worker.info.incarnation not in busy]


def _decode_order(worker: WorkerView, near: str = "") -> tuple[bool, int, float, str]:
    """The one that is near, then fewest requests first, then the emptiest pool."""
    used = 1 - worker.info.num_free_blocks / max(1, worker.info.num_blocks)
    return worker.info.incarnation != near, worker.load, used, worker.url


def _prefill_order(worker: WorkerView) -> tuple[int, str]:
    return worker.load, worker.url

"""Which tokens the next step computes, and who gets blocks. Pure: the engine and the simulator drive this class.

Each step computes at most max_batch_tokens tokens:

1. Decodes first, oldest first: every one gets its token in every step. A decode that needs a block when none is
   available takes it from the youngest decode younger than itself, which is preempted: it loses its blocks, keeps
   its output, and is recomputed later. Is there no younger one, it keeps its blocks and skips the step.
2. Admission, in order of arrival and never out of it. A request gets the blocks of all its tokens at once or none,
   and only if enough blocks remain for the running and reserved requests to grow by one block's worth of tokens
   beyond the end of every prefill in progress.
3. Prefills share the b tokens that decodes left, or fewer where steps have taken longer than max_itl_s allows for
   (engine.step_budget). The oldest gets up to ceil(b / 2); the rest goes to the prefill
   with the fewest tokens left, then the next; what they cannot use goes to the oldest.

What follows from it, and is tested:

- The gap between two tokens of a decode is one step, and a step is at most max_batch_tokens tokens, unless blocks
  run out; then the oldest decode still goes on, except while reserved and held requests fill the pool.
- A prompt with n tokens left is computed within ceil(n / floor(b / 2)) steps, however long the others are, unless
  prompts with as few tokens left go before it. The oldest is within ceil(n / ceil(b / 2)), whatever comes. Without
  max_itl_s b is at least the number of prefills, because max_num_seqs <= max_batch_tokens.
- A prefill is never preempted, so a request that was preempted samples a token before it can be preempted again.
- No waiting request is overtaken, by admission or by reservation.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Collection, Sequence
from operator import attrgetter
from typing import NamedTuple

from engine.block_pool import BlockPool, Owner
from engine.config import EngineConfig
from engine.messages import LedgerSnapshot
from engine.request import Request, RequestState
from engine.step_budget import StepBudget

_OWNERS = {
    RequestState.RUNNING: Owner.RUNNING,
    RequestState.RESERVED: Owner.RESERVED,
    RequestState.HELD: Owner.HELD,
}
_arrival = attrgetter("arrival")


class Scheduled(NamedTuple):
    """Compute tokens [request.num_computed, request.num_computed + num_tokens)."""

    request: Request
    num_tokens: int

    @property
    def samples(self) -> bool:
        return self.num_tokens == self.request.num_uncomputed


class Scheduler:
    """Owns the pool and every request. Callers refuse what can never fit before they add it."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._pool = BlockPool(config.num_blocks)
        self._waiting: deque[Request] = deque()  # by arrival
        self._running: list[Request] = []  # by arrival
        self._reserved: dict[str, Request] = {}
        self._held: dict[str, Request] = {}
        self._num_arrived = 0
        self._num_waiting_blocks = 0
        self._now = 0.0
        """Of the command or step that is being handled."""
        self._budget = StepBudget(config.max_itl_s)

    @property
    def num_active(self) -> int:
        """Requests that computing can bring forward."""
        return len(self._waiting) + len(self._running)

    @property
    def num_requests(self) -> int:
        return self.num_active + len(self._reserved) + len(self._held)

    @property
    def _num_seats_taken(self) -> int:
        """Requests that compute, or may from one moment to the next."""
        num_paused = sum(not request.prefill_only for request in self._held.values())
        return len(self._running) + len(self._reserved) + num_paused

    # A request's life

    def add(self, request: Request) -> None:
        """Queue it."""
        self._now = request.queued_at
        self._arrive(request)
        self._queue(request)

    def reserve(self, request: Request, now: float) -> bool:
        """Give it the blocks of all its tokens now. False: no room, nothing was taken.

        It leaves alone what requests that came earlier are waiting for.
        """
        self._now = now
        if self._num_seats_taken + len(self._waiting) >= self._config.max_num_seqs:
            return False
        if not self._take_blocks(request, RequestState.RESERVED, spare_blocks=self._num_waiting_blocks):
            return False
        self._arrive(request)
        self._reserved[request.request_id] = request
        return True

    def start(self, request: Request, token_id: int, now: float) -> None:
        """The KV of every token of a reserved request is written, and `token_id` was sampled elsewhere."""
        assert request.state is RequestState.RESERVED
        self._now = now
        del self._reserved[request.request_id]
        self._move(request, RequestState.RUNNING)
        insort(self._running, request, key=_arrival)
        self.computed(request, request.num_uncomputed)
        request.prefilling = False
        request.started_at = now
        self._append(request, token_id)

    def computed(self, request: Request, num_tokens: int) -> None:
        """KV of `num_tokens` more tokens is in its blocks: the blocks they fill can be hit from now on."""
        request.num_computed += num_tokens
        block_size = self._config.block_size
        num_full = request.num_computed // block_size
        if num_full == request.num_published or not self._config.prefix_caching:
            return
        keys = request.full_block_keys(block_size)
        for index in range(request.num_published, num_full):
            self._pool.publish(request.block_table[index], keys[index])
        request.num_published = num_full

    def sampled(self, request: Request, token_id: int, now: float) -> None:
        """`token_id` was sampled here from the last token of a running request."""
        assert request.num_uncomputed == 0, "sampled before every token was computed"
        request.prefilling = False
        if request.first_token_at is None:
            request.first_token_at = now
        request.last_token_at = now
        self._append(request, token_id)

    def hold(self, request: Request, now: float) -> None:
        """Computes no more, but its blocks stay until `end` or `resume`."""
        assert request.state is RequestState.RUNNING
        self._now = now
        self._running.remove(request)
        self._move(request, RequestState.HELD)
        self._held[request.request_id] = request

    def resume(self, request: Request, now: float) -> None:
        """What `hold` stopped goes on where it was, in its place by arrival."""
        assert request.state is RequestState.HELD
        self._now = now
        del self._held[request.request_id]
        self._move(request, RequestState.RUNNING)
        insort(self._running, request, key=_arrival)

    def end(self, request: Request, now: float) -> None:
        """Whatever its state: its blocks are back in the pool when this returns."""
        self._now = now
        if request.state is RequestState.WAITING:
            self._waiting.remove(request)
            self._num_waiting_blocks -= self._num_blocks(request.num_tokens)
        elif request.state is RequestState.RUNNING:
            self._running.remove(request)
        else:
            group = self._reserved if request.state is RequestState.RESERVED else self._held
            del group[request.request_id]
        self._drop_blocks(request)
        request.state = RequestState.ENDED

    # A step

    def schedule(self, now: float) -> list[Scheduled]:
        """The next step, decodes first. Empty: nothing can be computed until a command changes something."""
        self._now = now
        step, all_fit = self._schedule_decodes()
        if all_fit:
            self._admit()
        prefills = [request for request in self._running if request.prefilling]
        if prefills:
            left = [request.num_uncomputed for request in prefills]
            shares = share_prefill_tokens(left, self._max_prefill_tokens(len(step)))
            step += [Scheduled(*pair) for pair in zip(prefills, shares, strict=True) if pair[1]]
        for request, _ in step:
            if request.first_step_at is None:
                request.first_step_at = now
        return step

    def took(self, step: Sequence[Scheduled], duration_s: float) -> None:
        """How long the forward pass of `step` took. Called before `computed` is for any of it."""
        num_prefill_tokens = sum(num_tokens for request, num_tokens in step if request.prefilling)
        num_decodes = sum(1 for request, _ in step if not request.prefilling)
        self._budget.observe(num_decodes, num_prefill_tokens, duration_s)

    def _max_prefill_tokens(self, num_decodes: int) -> int:
        return self._budget.max_prefill_tokens(num_decodes, self._config.max_batch_tokens - num_decodes)

    def _schedule_decodes(self) -> tuple[list[Scheduled], bool]:
        """Also whether every decode got the block it needs, without a preemption."""
        step = []
        all_fit = True
        index = 0
        # A preemption removes requests behind `index` only.
        while index < len(self._running):
            request = self._running[index]
            index += 1
            if request.prefilling:
                continue
            if len(request.block_table) * self._config.block_size <= request.num_computed:
                if not self._pool.num_available:
                    all_fit = False
                    if not self._preempt_younger(index):
                        continue
                request.block_table += self._pool.take((), 1, Owner.RUNNING)
            step.append(Scheduled(request, 1))
        return step, all_fit

    def _preempt_younger(self, first: int) -> bool:
        """Preempt decodes, youngest first, until a block is available. Only _running[first:] are touched."""
        for index in range(len(self._running) - 1, first - 1, -1):
            request = self._running[index]
            if request.prefilling:
                continue
            del self._running[index]
            self._drop_blocks(request)
            request.num_preemptions += 1
            self._queue(request)
            # Blocks that it shared do not come back.
            if self._pool.num_available:
                return True
        return False

    def _admit(self) -> None:
        while self._waiting and self._num_seats_taken < self._config.max_num_seqs:
            request = self._waiting[0]
            if not self._take_blocks(request, RequestState.RUNNING):
                return
            self._waiting.popleft()
            self._num_waiting_blocks -= self._num_blocks(request.num_tokens)
            insort(self._running, request, key=_arrival)
            request.prefilling = True

    # Blocks

    def _take_blocks(self, request: Request, state: RequestState, spare_blocks: int = 0) -> bool:
        """Give `request` the blocks of all its tokens, sharing those of a cached prefix, if `spare_blocks` and
        the room for others to grow remain. At least one token is left to compute, to have logits from."""
        block_size = self._config.block_size
        hits: list[int] = []
        if self._config.prefix_caching:
            max_hits = (request.num_tokens - 1) // block_size
            if request.num_scored < request.num_prompt:
                max_hits = 0  # a cached prefix has no logits to score the prompt by
            hits = self._pool.match(request.full_block_keys(block_size)[:max_hits])
        num_blocks = self._num_blocks(request.num_tokens)
        num_spare = self._pool.num_available - self._pool.num_needed(hits, num_blocks) - spare_blocks
        num_uncached = request.num_tokens - len(hits) * block_size
        if num_spare < 0 or not self._leaves_growth(request, state, num_uncached, num_blocks, num_spare):
            return False
        request.block_table = self._pool.take(hits, num_blocks - len(hits), _OWNERS[state])
        request.num_computed = len(hits) * block_size
        request.num_published = len(hits)
        if not request.num_preemptions:
            request.num_cached_tokens = request.num_computed
        request.state = state
        request.since = self._now
        return True

    def _leaves_growth(
        self, request: Request, state: RequestState, num_uncached: int, num_blocks: int, num_spare: int
    ) -> bool:
        """Whether `num_spare` blocks let all running and reserved requests, `request` among them, decode until
        every prefill is done and then for block_size steps. A request that is alone needs no such room."""
        num_others = len(self._running) + len(self._reserved)
        if not num_others:
            return True
        num_prefill_tokens = sum(other.num_uncomputed for other in self._running if other.prefilling)
        if state is RequestState.RUNNING:
            num_prefill_tokens += num_uncached
        # As if all others were decoding already: the slowest that the prefills can go.
        # Not by the measured budget: where that is small, a prompt would wait for more room than a small pool has.
        num_steps = -(-num_prefill_tokens // (self._config.max_batch_tokens - num_others))
        num_steps += self._config.block_size
        if num_spare >= (num_others + 1) * self._num_blocks(num_steps + self._config.block_size):
            return True
        growth = self._growth_blocks(request, num_blocks, num_steps)
        growth += sum(self._growth_blocks(r, len(r.block_table), num_steps) for r in self._running)
        growth += sum(self._growth_blocks(r, len(r.block_table), num_steps) for r in self._reserved.values())
        return num_spare >= growth

    def _growth_blocks(self, request: Request, num_blocks: int, num_steps: int) -> int:
        """Blocks that a request of `num_blocks` blocks lacks to decode `num_steps` steps."""
        num_tokens = min(request.num_tokens + num_steps, request.max_kv_tokens())
        return max(0, self._num_blocks(num_tokens) - num_blocks)

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._config.block_size)

    # Changes of state

    def _arrive(self, request: Request) -> None:
        self._num_arrived += 1
        request.arrival = self._num_arrived

    def _queue(self, request: Request) -> None:
        """By arrival: a new request goes last, a preempted one nearly always first."""
        index = len(self._waiting)
        if self._waiting and request.arrival < self._waiting[-1].arrival:
            index = next(i for i, other in enumerate(self._waiting) if request.arrival < other.arrival)
        self._waiting.insert(index, request)
        self._num_waiting_blocks += self._num_blocks(request.num_tokens)
        request.state = RequestState.WAITING
        request.since = self._now

    def _append(self, request: Request, token_id: int) -> None:
        request.output_token_ids.append(token_id)
        request.token_ids.append(token_id)

    def _move(self, request: Request, state: RequestState) -> None:
        self._pool.move(request.block_table, _OWNERS[request.state], _OWNERS[state])
        request.state = state
        request.since = self._now

    def _drop_blocks(self, request: Request) -> None:
        if request.block_table:
            self._pool.free(request.block_table, _OWNERS[request.state], self._now)
        request.block_table = []
        request.num_computed = 0
        request.num_published = 0

    # What can be seen of it

    def ledger(self) -> LedgerSnapshot:
        return LedgerSnapshot(
            num_blocks=self._pool.num_blocks,
            free=self._pool.num_free,
            cached=self._pool.num_cached,
            running=self._pool.num_owned(Owner.RUNNING),
            reserved=self._pool.num_owned(Owner.RESERVED),
            held=self._pool.num_owned(Owner.HELD),
            requests={
                "waiting": len(self._waiting),
                "running": len(self._running),
                "reserved": len(self._reserved),
                "held": len(self._held),
            },
            oldest=self._oldest(),
        )

    def _oldest(self) -> dict[str, float]:
        groups: dict[str, Collection[Request]] = {
            "waiting": self._waiting,
            "running": self._running,
            "reserved": self._reserved.values(),
            "held": self._held.values(),
        }
        oldest = {state: min(request.since for request in group) for state, group in groups.items() if group}
        cached_at = self._pool.oldest_cached_at
        return oldest if cached_at is None else oldest | {"cached": cached_at}

    def check_integrity(self) -> None:
        """Assert that requests and pool agree on every reference. Walks the pool and every block table."""
        self._pool.check_integrity()
        groups: dict[Owner, Sequence[Request]] = {
            Owner.RUNNING: self._running,
            Owner.RESERVED: list(self._reserved.values()),
            Owner.HELD: list(self._held.values()),
        }
        for owner, requests in groups.items():
            refs = [0] * self._pool.num_blocks
            for request in requests:
                assert _OWNERS[request.state] is owner, f"{request.request_id} is {request.state}, not {owner}"
                assert len(set(request.block_table)) == len(request.block_table), "a block twice in a table"
                for block in request.block_table:
                    refs[block] += 1
            expected = [self._pool.num_refs(block, owner) for block in range(self._pool.num_blocks)]
            assert refs == expected, f"references by {owner.name} requests are not those that the pool counts"
        assert all(not request.block_table for request in self._waiting), "a waiting request owns blocks"
        waiting_blocks = sum(self._num_blocks(request.num_tokens) for request in self._waiting)
        assert waiting_blocks == self._num_waiting_blocks, "the count of awaited blocks has drifted"


def share_prefill_tokens(left: Sequence[int], budget: int) -> list[int]:
    """Tokens of `budget` for each prefill, oldest first, that has left[i] tokens to compute: up to ceil(budget/2)
    for the oldest, the rest to the shortest first, what remains to the oldest."""
    shares = [0] * len(left)
    shares[0] = min(left[0], -(-budget // 2))
    budget -= shares[0]
    for index in sorted(range(1, len(left)), key=left.__getitem__):
        shares[index] = min(left[index], budget)
        budget -= shares[index]
    shares[0] += min(left[0] - shares[0], budget)
    return shares

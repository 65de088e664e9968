"""One choice of one request on its way through the workers, whatever number of attempts that takes.

Changed on the event loop by the handoff only.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from services.gateway.router import Needs
from services.gateway.timeline import Timeline
from services.protocol import PromptLogprobs, Sampling, TokenLogprob, Tokens

NewTokens = list[tuple[int, TokenLogprob | None]]


class OutOfOrder(Exception):
    """A worker skipped an output index: its stream cannot be used any further."""


@dataclass(slots=True)
class Job:
    request_id: str
    prompt_token_ids: list[int]
    sampling: Sampling
    deadline: float
    """On the event loop's clock."""
    ticket: int
    timeline: Timeline
    cache_domain: bytes = b""
    """Requests of different domains never share cached KV."""
    near: str = ""
    """Incarnation of the decode worker that another choice has brought the prompt's KV to."""
    decoded_by: str = ""
    """Incarnation of the decode worker it was last given to."""
    output_token_ids: list[int] = field(default_factory=list)
    """Every output token so far, each once; what the client has been given, or is about to be."""
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    """Of the prompt tokens after the first, as far as they have come."""
    finish_reason: str | None = None
    num_failures: int = 0
    num_tries: int = 0
    """Attempts begun, those that found a worker busy included: makes each attempt's request id unique."""
    avoid: set[str] = field(default_factory=set)
    """Incarnations that have failed this request."""

    def needs(self) -> Needs:
        num_prompt = len(self.prompt_token_ids)
        left = self.sampling.max_tokens - len(self.output_token_ids)
        return Needs(
            num_computed_tokens=num_prompt + len(self.output_token_ids),
            num_total_tokens=num_prompt + self.sampling.max_tokens,
            one_token=left == 1,
            near=self.near,
        )

    def take(self, frame: Tokens) -> NewTokens:
        """The tokens of a frame that are new, in order: both workers send the first one. Raises
        OutOfOrder."""
        seen = len(self.output_token_ids) - frame.index
        if seen < 0:
            raise OutOfOrder(f"output token {frame.index} came when {len(self.output_token_ids)} was next")
        token_ids = frame.token_ids[seen:]
        self.output_token_ids += token_ids
        if not frame.logprobs:
            return [(token_id, None) for token_id in token_ids]
        if len(frame.logprobs) != len(frame.token_ids):
            raise OutOfOrder("a frame has log probabilities for only some of its tokens")
        return list(zip(token_ids, frame.logprobs[seen:], strict=True))

    def take_prompt_logprobs(self, frame: PromptLogprobs) -> None:
        """What is new of them: an attempt after a failed one begins again. Raises OutOfOrder."""
        seen = len(self.prompt_logprobs) + 1 - frame.start
        if seen < 0:
            raise OutOfOrder(f"prompt token {frame.start} was scored out of turn")
        self.prompt_logprobs += frame.logprobs[seen:]

    @property
    def lacks_prompt_logprobs(self) -> bool:
        wanted = self.sampling.prompt_logprobs is not None
        return wanted and len(self.prompt_logprobs) < len(self.prompt_token_ids) - 1

    def known_ending(self) -> str | None:
        """How the output ended, where the tokens themselves tell, although no worker lived to say so."""
        if self.output_token_ids and self.output_token_ids[-1] in self.sampling.stop_token_ids:
            return "stop"
        return "length" if len(self.output_token_ids) >= self.sampling.max_tokens else None

"""Between the wire's types and the engine's. Pure."""

from __future__ import annotations

from engine import messages
from services import protocol
from services.sampling import engine_params
from services.worker.engine_client import DeadlinePassed


def engine_request(work: protocol.Work, *, prefill_only: bool = False) -> messages.EngineRequest:
    return messages.EngineRequest(
        request_id=work.request_id,
        prompt_token_ids=tuple(work.prompt_token_ids),
        sampling=engine_params(work.sampling),
        output_token_ids=tuple(work.output_token_ids),
        cache_domain=work.cache_domain,
        prefill_only=prefill_only,
    )


def wire_logprobs(logprobs: messages.TokenLogprobs | None) -> list[protocol.TokenLogprob]:
    if logprobs is None:
        return []
    return [protocol.TokenLogprob(logprob=logprobs.logprob, top=list(logprobs.top))]


def tokens_frame(event: messages.TokenOut) -> protocol.Tokens:
    return protocol.Tokens(index=event.index, token_ids=[event.token_id], logprobs=wire_logprobs(event.logprobs))


def prompt_logprobs_frame(event: messages.PromptScored) -> protocol.PromptLogprobs:
    return protocol.PromptLogprobs(
        start=event.start,
        logprobs=[protocol.TokenLogprob(logprob=one.logprob, top=list(one.top)) for one in event.logprobs],
    )


def wire_stats(stats: messages.RequestStats, **transfer: float | int | str) -> protocol.Stats:
    return protocol.Stats(
        queue_s=stats.queue_s,
        prefill_s=stats.prefill_s,
        first_step_s=stats.first_step_s,
        decode_s=stats.decode_s,
        num_cached_tokens=stats.num_cached_tokens,
        num_output_tokens=stats.num_output_tokens,
        num_preemptions=stats.num_preemptions,
        **transfer,  # type: ignore[arg-type]
    )


def ended(
    event: messages.Finished | messages.Refused | messages.EngineFailed | DeadlinePassed,
) -> protocol.Frame:
    """The last frame for an event that ends a request on this worker."""
    if isinstance(event, messages.EngineFailed):
        return protocol.Failure(message=f"the engine stopped: {event.message}", kind="internal")
    if isinstance(event, DeadlinePassed):
        return protocol.Failure(message=f"not finished within {event.deadline_s:.1f} s", kind="deadline")
    if isinstance(event, messages.Refused):
        if event.reason == "busy":
            return protocol.Busy(message=event.message)
        return protocol.Failure(message=event.message, kind="invalid", param=event.param)
    if event.reason in ("stop", "length"):
        return protocol.Finish(reason=event.reason, stats=wire_stats(event.stats))
    return protocol.Failure(message=event.message or f"the request ended: {event.reason}", kind="internal")

"""One choice of an answer: from the tokens of its job to deltas. On the event loop.

The text of a choice is the same whatever the grouping in which its tokens arrive.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from services.gateway.errors import Failed
from services.gateway.job import Job, NewTokens
from services.gateway.output import Delta, Ending, Reason, ScoredToken
from services.gateway.plan import OutputParser, TextOptions
from services.gateway.text.text_stream import TextStream


class Choice:
    def __init__(
        self,
        index: int,
        job: Job,
        stream: TextStream,
        options: TextOptions,
        *,
        echo: str = "",
        prompt_offsets: Sequence[int] = (),
        parser: OutputParser | None = None,
        eos_token_ids: Collection[int] = (),
    ) -> None:
        self.index = index
        self.job = job
        self._stream = stream
        self._options = options
        self._echo = echo
        self._prompt_offsets = prompt_offsets
        """Where each prompt token begins in the echo."""
        self._early: NewTokens = []
        self._parser = parser
        self._eos_token_ids = eos_token_ids
        self._num_echoed_chars = len(echo)
        self.num_reasoning_tokens = 0

    @property
    def stopped(self) -> bool:
        """The answer is complete, whatever else the job would make."""
        return self._stream.stopped or (self._parser is not None and self._parser.ended)

    @property
    def num_tokens(self) -> int:
        return 0 if self._options.no_output else self._stream.num_tokens

    def read(self, batch: NewTokens) -> Delta:
        """What new tokens add. Tokens after a stop string are not read."""
        if self.job.lacks_prompt_logprobs:
            # Decode's copy of the first token was here before prefill's last words on the prompt.
            self._early += batch
            return Delta()
        batch, self._early = [*self._early, *batch], []
        delta = self._take_echo()
        if self._options.no_output:
            return delta
        scored, token_ids = list(delta.scored), []
        for token_id, logprob in batch:
            if logprob is not None:
                scored.append(ScoredToken(token_id, logprob, self._num_echoed_chars + self._stream.num_chars))
            token_ids.append(token_id)
            delta = self._parsed(delta, self._stream.push(token_id))
            if self.stopped:
                break
        delta.scored = scored
        if self._options.token_ids:
            delta.token_ids = token_ids
        return delta

    def finish(self) -> Delta:
        """The rest, once the job has ended or a stop string was met."""
        if self.job.lacks_prompt_logprobs:
            raise Failed("the log probabilities of the prompt did not arrive")
        delta = self.read([]) if self._early else self._take_echo()
        if self._options.no_output:
            return delta
        rest = self._stream.flush()
        if self._parser is None:
            delta.content += rest
            return delta
        return delta.then(self._parser.push(rest)).then(self._parser.flush())

    def ending(self) -> Ending:
        if self._options.no_output:
            return Ending("length")
        if self.stopped:
            return Ending(self._reason("stop"), self._stream.stop)
        reason = self.job.finish_reason
        assert reason in ("stop", "length"), f"a job ended with {reason!r}"
        last = self.job.output_token_ids[-1] if self.job.output_token_ids else None
        ours = reason != "stop" or last in self._eos_token_ids
        return Ending(self._reason(reason), None if ours else last)  # type: ignore[arg-type]

    def _reason(self, reason: Reason) -> Reason:
        """A call that was cut off is no call to make."""
        called = self._parser is not None and self._parser.num_tool_calls > 0
        return "tool_calls" if called and reason == "stop" else reason

    def _take_echo(self) -> Delta:
        """The prompt, once, with its log probabilities if they were asked for."""
        echo, self._echo = self._echo, ""
        delta = Delta(echo)
        if self._prompt_offsets and self.job.sampling.prompt_logprobs is not None:
            offsets, self._prompt_offsets = self._prompt_offsets, []
            logprobs = [None, *self.job.prompt_logprobs]
            delta.scored = list(map(ScoredToken, self.job.prompt_token_ids, logprobs, offsets))
        return delta

    def _parsed(self, before: Delta, text: str) -> Delta:
        if self._parser is None:
            before.content += text
            return before
        was_thinking = self._parser.thinking
        after = before.then(self._parser.push(text)) if text else before
        self.num_reasoning_tokens += was_thinking or self._parser.thinking
        return after

"""The choices of one request side by side, as one stream of deltas. On the event loop.

The first choice of each prompt leads: the others start once its prompt's KV is in decode's prefix cache, so that
the prompt is computed and shipped once and each choice has only its own tail.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from services.gateway.choice import Choice
from services.gateway.job import Job, NewTokens
from services.gateway.output import Delta, Ending

MAX_WAITING = 64
"""Steps that a slow reader lets pile up before the workers' streams are no longer read."""
TOKENS_OF_LEADER = 2
"""The second token is decode's own: it can only be there once the KV of the whole prompt is."""

Run = Callable[[Job], AsyncGenerator[NewTokens, None]]
Step = tuple[Choice, Delta, Ending | None]
"""A choice, what was added to it, and how it ended if that was all."""


async def run_choices(run: Run, choices: Sequence[Choice], num_per_prompt: int) -> AsyncGenerator[Step, None]:
    """Raises what `run` raises, for whichever choice fails first; the others are ended then, as on closing."""
    if len(choices) == 1:
        async with aclosing(_steps(run, choices[0])) as steps:
            async for step in steps:
                yield step
        return
    async with aclosing(_side_by_side(run, choices, num_per_prompt)) as steps:
        async for step in steps:
            yield step


async def _steps(run: Run, choice: Choice) -> AsyncGenerator[Step, None]:
    async with aclosing(run(choice.job)) as batches:
        async for batch in batches:
            delta = choice.read(batch)
            if choice.stopped:
                break
            yield choice, delta, None
        else:
            delta = Delta()
    yield choice, delta.then(choice.finish()), choice.ending()


async def _side_by_side(run: Run, choices: Sequence[Choice], num_per_prompt: int) -> AsyncGenerator[Step, None]:
    arrived: asyncio.Queue[Step | BaseException] = asyncio.Queue(MAX_WAITING)

    async def pump(choice: Choice, prompt_is_cached: asyncio.Event) -> None:
        leader = choices[choice.index - choice.index % num_per_prompt]
        try:
            if choice is not leader:
                await prompt_is_cached.wait()
                choice.job.near = leader.job.decoded_by
            async with aclosing(_steps(run, choice)) as steps:
                async for step in steps:
                    if len(choice.job.output_token_ids) >= TOKENS_OF_LEADER:
                        prompt_is_cached.set()
                    await arrived.put(step)
        except Exception as error:
            await arrived.put(error)
        finally:
            prompt_is_cached.set()

    cached = [asyncio.Event() for _ in range(len(choices) // num_per_prompt)]
    tasks = [asyncio.create_task(pump(choice, cached[choice.index // num_per_prompt])) for choice in choices]
    try:
        num_running = len(choices)
        while num_running:
            step = await arrived.get()
            if isinstance(step, BaseException):
                raise step
            num_running -= step[2] is not None
            yield step
    finally:
        for task in tasks:
            task.cancel()
        # Not abandoned: the streams to the workers are closed in there.
        await asyncio.wait(tasks)

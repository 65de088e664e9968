"""Run a whole system on one machine until Ctrl-C or SIGTERM."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from services.serve.config import ServeConfig
from services.serve.console import ServeConsole
from services.serve.plan import SystemPlan, plan
from services.serve.supervisor import StartFailed, Supervisor


def run(config: ServeConfig) -> int:
    """Returns the exit status."""
    console = ServeConsole()
    model = config.model or default_model()
    if model is None:
        return 1
    return asyncio.run(_main(config, model, console))


def default_model() -> Path | None:
    """The built-in model, fetched and imported with a bar the first time; None after a failure was shown."""
    from services.model_cli import import_default_model

    return import_default_model()


@asynccontextmanager
async def system(
    config: ServeConfig, model: Path, console: ServeConsole, stop: asyncio.Event
) -> AsyncIterator[tuple[Supervisor, SystemPlan]]:
    """A running system. Raises StartFailed, also when `stop` is set before it is ready; leaves nothing running."""
    secret = config.secret.get_secret_value() if config.secret else secrets.token_urlsafe(32)
    layout = plan(config, model, sorted(os.sched_getaffinity(0)))
    supervisor = Supervisor(config, layout, secret, console)
    with _signals(supervisor, stop):
        try:
            with console:
                await first_of(supervisor.start(), stop.wait())
            if stop.is_set():
                raise StartFailed("told to stop before it was ready")
            yield supervisor, layout
        finally:
            await supervisor.stop()


async def first_of(*coroutines: Coroutine[Any, Any, Any]) -> None:
    """Wait for the first to end, cancel the others, raise what the first one raised."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


@contextmanager
def _signals(supervisor: Supervisor, stop: asyncio.Event) -> Iterator[None]:
    """The first SIGINT or SIGTERM sets `stop`; the next one kills what is still running."""
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if stop.is_set():
            supervisor.kill()
        stop.set()

    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


async def _main(config: ServeConfig, model: Path, console: ServeConsole) -> int:
    stop = asyncio.Event()
    try:
        async with system(config, model, console, stop) as (supervisor, layout):
            console.say(f"serving {layout.public_url}/v1  (Ctrl-C stops)")
            await first_of(supervisor.failed.wait(), stop.wait())
            console.say("stopping")
    except StartFailed as error:
        console.say(f"[red]stopped[/red] {error}")
        return 0 if stop.is_set() else 1
    if not stop.is_set():
        console.say("[red]stopped[/red] a process crashed too often")
        return 1
    return 0

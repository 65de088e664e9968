"""Holding a stream: asked twice, asked in vain, answered too late."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from engine import messages
from services.decode import departure
from services.decode.departure import Departure, Stream
from services.protocol import Failure, Held, HoldRequest, Sampling, Work

REQUEST = HoldRequest(request_id="r")


class Engine:
    """Takes commands; the test answers."""

    def __init__(self) -> None:
        self.commands: list[Any] = []

    def submit(self, command: Any) -> None:
        self.commands.append(command)


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def stream() -> Stream:
    work = Work(request_id="r", prompt_token_ids=[1], sampling=Sampling(max_tokens=9, seed=0), deadline_s=9.0)
    made = Stream(work, asyncio.Queue())
    made.sent(3, 42)
    return made


@pytest.fixture
def leaving(engine: Engine, stream: Stream) -> Departure:
    return Departure(engine, None, {"r": stream}, secret="s" * 16, incarnation="d")  # type: ignore[arg-type]


async def test_two_who_ask_at_once_get_the_one_answer(engine: Engine, stream: Stream, leaving: Departure) -> None:
    asked = [asyncio.create_task(leaving.hold(REQUEST)) for _ in range(2)]
    await asyncio.sleep(0)
    assert engine.commands == [messages.Hold("r")]
    assert stream.answer_hold(messages.Held("r", ok=True, num_tokens=4))
    assert await asyncio.gather(*asked) == [Held(num_output_tokens=4)] * 2
    assert await leaving.hold(REQUEST) == Held(num_output_tokens=4), "it is held already"
    assert engine.commands == [messages.Hold("r")]


async def test_an_answer_that_comes_too_late_is_to_be_undone(
    stream: Stream, leaving: Departure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(departure, "HOLD_S", 0.01)
    assert isinstance(await leaving.hold(REQUEST), Failure)
    assert not stream.answer_hold(messages.Held("r", ok=True, num_tokens=4)), "nobody waits: resume it"
    assert stream.held is None


async def test_a_stream_that_ends_is_no_longer_waited_for(stream: Stream, leaving: Departure) -> None:
    asked = asyncio.create_task(leaving.hold(REQUEST))
    await asyncio.sleep(0)
    stream.close()
    assert isinstance(await asked, Failure)
    assert isinstance(await leaving.hold(HoldRequest(request_id="other")), Failure)


async def test_a_token_after_a_hold_means_that_it_goes_on(stream: Stream, leaving: Departure) -> None:
    asked = asyncio.create_task(leaving.hold(REQUEST))
    await asyncio.sleep(0)
    stream.answer_hold(messages.Held("r", ok=True, num_tokens=4))
    await asked
    stream.sent(4, 7)
    assert stream.held is None


async def test_everyone_is_told_once_it_leaves_and_so_is_who_comes_late(stream: Stream, leaving: Departure) -> None:
    leaving.announce()
    assert stream.leaving
    assert not stream.events.empty()
    assert leaving.announced

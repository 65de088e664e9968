"""The queue for busy workers: by age, one asks at a time, bounded."""

from __future__ import annotations

import asyncio

import pytest

from services.gateway.admission import Admission
from services.gateway.errors import Overloaded

NEVER_S = 3600.0


async def settle() -> None:
    """Let every task run until it waits."""
    for _ in range(20):
        await asyncio.sleep(0)


class Room:
    """Workers with so many places. `placed` lists who got one, in order."""

    def __init__(self, admission: Admission, places: int) -> None:
        self.admission = admission
        self.places = places
        self.placed: list[str] = []
        self.asked: list[str] = []

    async def enter(self, name: str, ticket: int | None = None) -> None:
        ticket = self.admission.ticket() if ticket is None else ticket
        refused = False
        with self.admission.turn(ticket) as turn:
            while True:
                await turn.wait(was_refused=refused)
                self.asked.append(name)
                if self.places:
                    self.places -= 1
                    self.placed.append(name)
                    return
                refused = True

    def free(self, places: int = 1) -> None:
        self.places += places
        self.admission.capacity_freed()


async def test_with_room_nobody_waits() -> None:
    room = Room(Admission(0, NEVER_S), 3)
    await asyncio.gather(*(room.enter(name) for name in "abc"))
    assert room.placed == ["a", "b", "c"]


async def test_the_queue_is_served_by_age_and_only_the_oldest_asks() -> None:
    room = Room(Admission(10, NEVER_S), 0)
    tasks = [asyncio.create_task(room.enter(name)) for name in "abcd"]
    await settle()
    assert room.admission.num_queued == 4
    room.asked.clear()
    room.free()
    await settle()
    assert room.placed == ["a"]
    assert room.asked == ["a", "b"], "the next one asks as soon as it is the oldest"
    room.free(3)
    await asyncio.gather(*tasks)
    assert room.placed == ["a", "b", "c", "d"]
    assert room.admission.num_queued == 0


async def test_a_newcomer_does_not_overtake_those_who_wait() -> None:
    room = Room(Admission(10, NEVER_S), 0)
    first = asyncio.create_task(room.enter("first"))
    await settle()
    room.places = 1  # nobody has been told yet
    late = asyncio.create_task(room.enter("late"))
    await settle()
    assert room.placed == []
    room.free()
    await asyncio.gather(first, late)
    assert room.placed == ["first", "late"]


async def test_an_older_request_that_comes_back_goes_first() -> None:
    room = Room(Admission(10, NEVER_S), 0)
    old = room.admission.ticket()
    young = asyncio.create_task(room.enter("young"))
    await settle()
    back = asyncio.create_task(room.enter("old", old))
    await settle()
    room.free(2)
    await asyncio.gather(back, young)
    assert room.placed == ["old", "young"]


async def test_one_that_gives_up_does_not_block_the_rest() -> None:
    room = Room(Admission(10, NEVER_S), 0)
    first, second = asyncio.create_task(room.enter("first")), asyncio.create_task(room.enter("second"))
    await settle()
    first.cancel()
    await settle()
    assert room.admission.num_queued == 1
    room.free()
    await second
    assert room.placed == ["second"]


async def test_a_full_queue_refuses() -> None:
    room = Room(Admission(1, NEVER_S), 0)
    waiting = asyncio.create_task(room.enter("waits"))
    await settle()
    with pytest.raises(Overloaded) as refused:
        await room.enter("one too many")
    assert refused.value.headers() == {"retry-after": "1"}
    room.free()
    await waiting


async def test_the_workers_are_asked_again_after_a_while_without_any_sign() -> None:
    room = Room(Admission(10, 0.001), 0)

    class Opens(list[str]):
        """Room appears with the third question, and nobody is told."""

        def append(self, name: str) -> None:
            super().append(name)
            room.places = int(len(self) == 3)

    room.asked = Opens()
    async with asyncio.timeout(10):
        await room.enter("a")
    assert room.asked == ["a", "a", "a"]


async def test_a_lower_priority_number_goes_first_whenever_it_came() -> None:
    admission = Admission(9, NEVER_S)
    room = Room(admission, 0)
    tickets = {"low": admission.ticket(5), "usual": admission.ticket(), "high": admission.ticket(-1)}
    tasks = [asyncio.create_task(room.enter(name, ticket)) for name, ticket in tickets.items()]
    await settle()
    room.free(3)
    await asyncio.gather(*tasks)
    assert room.placed == ["high", "usual", "low"]

"""The staging pool: bounded, first come first served, and never two owners of one buffer."""

from __future__ import annotations

import asyncio

import pytest

from transport.staging import StagingPool


async def test_it_makes_what_its_bound_allows_and_then_waits() -> None:
    pool = StagingPool(10, 30)
    lent = [await pool.lend() for _ in range(3)]
    assert len({id(buffer) for buffer in lent}) == 3
    waiting = [asyncio.ensure_future(pool.lend()) for _ in range(2)]
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    pool.give_back(lent[1])
    assert await waiting[0] is lent[1], "first come, first served"
    assert pool.num_lent == 3
    waiting[1].cancel()


async def test_two_buffers_are_the_least_whatever_the_bound() -> None:
    pool = StagingPool(100, 1)
    await pool.lend()
    await pool.lend()
    assert pool.num_lent == 2


async def test_a_waiter_that_leaves_takes_nothing_with_it() -> None:
    pool = StagingPool(10, 20)
    lent = [await pool.lend(), await pool.lend()]
    leaving, staying = asyncio.ensure_future(pool.lend()), asyncio.ensure_future(pool.lend())
    await asyncio.sleep(0)
    leaving.cancel()
    pool.give_back(lent[0])
    assert await staying is lent[0]
    with pytest.raises(asyncio.CancelledError):
        await leaving


async def test_a_waiter_cancelled_after_it_was_served_passes_the_buffer_on() -> None:
    pool = StagingPool(10, 20)
    lent = [await pool.lend(), await pool.lend()]
    served, next_ = asyncio.ensure_future(pool.lend()), asyncio.ensure_future(pool.lend())
    await asyncio.sleep(0)
    pool.give_back(lent[0])  # `served` has it, and has not run yet
    served.cancel()
    assert await next_ is lent[0]
    pool.give_back(lent[0])
    pool.give_back(lent[1])
    assert pool.num_lent == 0


async def test_a_quarantined_buffer_is_never_lent_again_and_the_pool_stays_usable() -> None:
    pool = StagingPool(10, 20)
    bad = [await pool.lend(), await pool.lend()]
    waiting = asyncio.ensure_future(pool.lend())
    await asyncio.sleep(0)
    pool.quarantine(bad[0])
    assert pool.num_quarantined == 1
    fresh = await waiting
    assert all(fresh is not buffer for buffer in bad)
    pool.quarantine(bad[1])
    assert await pool.lend() is not bad[1]
    assert (pool.num_lent, pool.num_quarantined) == (2, 2)

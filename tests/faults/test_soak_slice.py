"""A slice of `make soak`: random fault schedules against the whole system."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.soak.run import soak
from tests.soak.schedule import make_schedule
from tests.support.tiny_model import make_tiny_model

NUM_SCHEDULES = 30


@pytest.mark.timeout(600)
def test_random_schedules_lose_leak_and_invent_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_tiny_model(tmp_path / "tiny", hidden=128, layers=4)
    totals = soak(model, seed=20, numbers=range(NUM_SCHEDULES), progress=print)
    with capsys.disabled():
        print("\nsoak: " + json.dumps(totals.shown()))
    assert totals.clean, totals.shown()
    assert totals.num_schedules == NUM_SCHEDULES
    assert sum(totals.injected.values()) > NUM_SCHEDULES / 2, "faults did happen"
    assert totals.right > NUM_SCHEDULES, "and most requests ended with their answer all the same"


def test_a_schedule_can_be_had_again() -> None:
    roles = ["prefill", "decode"]
    assert make_schedule(3, 417, roles, 8) == make_schedule(3, 417, roles, 8)
    assert make_schedule(3, 417, roles, 8) != make_schedule(4, 417, roles, 8)

from __future__ import annotations

import pytest

from services.worker.fault_shim import FaultShim


def test_pauses_and_fabric_faults_are_told_apart() -> None:
    shim = FaultShim("pause:step:2:0.001,drop:ack:1")
    for _ in range(3):
        shim.before_step()
    assert shim.injected() == {"pause:step": 1}
    shim.set("pause:step:*:0.001")
    shim.before_step()
    shim.before_step()
    assert shim.injected() == {"pause:step": 2}, "counting starts anew"
    shim.set("")
    shim.before_step()
    assert shim.injected() == {"pause:step": 0}


@pytest.mark.parametrize(
    "text", ["pause:step:1", "pause:engine:1:1", "pause:step:x:1", "explode:segment:1", "drop:ack"]
)
def test_what_is_no_fault_is_refused_and_changes_nothing(text: str) -> None:
    shim = FaultShim("pause:step:1:0.001")
    with pytest.raises(ValueError, match="not a fault"):
        shim.set(text)
    shim.before_step()
    assert shim.injected() == {"pause:step": 1}

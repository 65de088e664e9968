from __future__ import annotations

import pytest

from transport.faults import Fault, parse_faults


def test_faults_are_read_from_a_short_text() -> None:
    assert parse_faults("drop:commit:1, corrupt:segment:*,delay:ack:2:0.5") == (
        Fault("drop", "commit", 1),
        Fault("corrupt", "segment", None),
        Fault("delay", "ack", 2, 0.5),
    )
    assert parse_faults("") == ()


@pytest.mark.parametrize(
    "text", ["drop", "drop:commit", "lose:commit:1", "drop:payload:1", "drop:commit:x", "delay:ack:1", "drop:ack:1:2"]
)
def test_a_fault_that_is_none_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=f"not a fault: '{text}'"):
        parse_faults(text)

"""What counts as a system that moves KV."""

import pytest

from services.check import CheckFailed, moved


def test_bytes_and_lane_of_the_transfer_are_given() -> None:
    transfer = {"bytes": 100, "seconds": 0.5, "lane": "rc_mlx5/mlx5_0:1"}
    assert moved({"transfer": transfer}) == transfer


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"transfer": None, "prefill": {"why_local": "no prefill worker is there"}}, "no prefill worker is there"),
        ({"transfer": {"bytes": 0, "lane": "tcp/lo"}, "prefill": {}}, "shows no transfer"),
        ({"transfer": {"bytes": 5, "lane": ""}}, "nothing says over which lane"),
        ({}, "shows no transfer"),
    ],
)
def test_an_answer_without_moved_kv_fails_with_the_reason(record: dict, reason: str) -> None:
    with pytest.raises(CheckFailed, match=reason):
        moved(record)

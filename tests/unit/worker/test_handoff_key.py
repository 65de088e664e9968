"""A worker takes part in a handoff only with a key that the gateway minted for it, and while that is good."""

from __future__ import annotations

import msgspec
import pytest

from services import auth
from services.protocol import Handoff
from services.worker import handoff_key

SECRET = "sixteen characters"
EXPIRES = 1_000_060


def handoff(**changes: object) -> Handoff:
    """Minted, then changed: as somebody would who has seen one on the wire."""
    fields = (b"0123456789abcdef", 1, "p", "d", EXPIRES)
    minted = Handoff(
        handoff_id=fields[0],
        attempt=1,
        prefill_incarnation="p",
        decode_incarnation="d",
        lease_s=10.0,
        expires_at=EXPIRES,
        key=auth.handoff_key(SECRET, *fields),
    )
    return msgspec.structs.replace(minted, **changes)


@pytest.mark.parametrize(("own", "receives"), [("d", True), ("p", False)])
def test_both_parties_accept_a_minted_key_until_it_expires(own: str, receives: bool) -> None:
    assert handoff_key.refusal(handoff(), SECRET, own, receives=receives, now=EXPIRES) is None
    late = handoff_key.refusal(handoff(), SECRET, own, receives=receives, now=EXPIRES + 1)
    assert late is not None
    assert late.kind == "deadline"


@pytest.mark.parametrize(
    "changes",
    [
        {"handoff_id": b"0123456789abcdeg"},
        {"attempt": 2},
        {"prefill_incarnation": "q"},
        {"expires_at": EXPIRES + 3600},
        {"key": bytes(32)},
    ],
)
def test_no_field_can_be_changed(changes: dict[str, object]) -> None:
    refused = handoff_key.refusal(handoff(**changes), SECRET, "d", receives=True, now=0.0)
    assert refused is not None
    assert (refused.kind, refused.param) == ("invalid", "handoff")


def test_the_parties_have_their_sides() -> None:
    for own, receives in (("p", True), ("d", False), ("e", True)):
        refused = handoff_key.refusal(handoff(), SECRET, own, receives=receives, now=0.0)
        assert refused is not None
        assert "another incarnation" in refused.message

"""Whether a handoff that a request names is one that the gateway minted, for this process, and still good. Pure."""

from __future__ import annotations

import hmac

from services import auth
from services.protocol import Failure, Handoff


def refusal(handoff: Handoff, secret: str, own_incarnation: str, *, receives: bool, now: float) -> Failure | None:
    """Why it is refused, or None. `receives`: this process is the one that the KV goes to. `now`: wall clock."""
    named = handoff.decode_incarnation if receives else handoff.prefill_incarnation
    if named != own_incarnation:
        return Failure(message="the handoff names another incarnation of this worker", kind="unavailable")
    expected = auth.handoff_key(
        secret,
        handoff.handoff_id,
        handoff.attempt,
        handoff.prefill_incarnation,
        handoff.decode_incarnation,
        handoff.expires_at,
    )
    if not hmac.compare_digest(expected, handoff.key):
        return Failure(message="the handoff key is not the gateway's", kind="invalid", param="handoff")
    if now > handoff.expires_at:
        return Failure(message="the handoff key has expired", kind="deadline")
    return None

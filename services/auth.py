"""Who may speak to a worker: the service token on internal HTTP, and the key of one handoff.

Both stand on one shared secret (KVBATON__SECRET, or the file that --secret-file names). UCX bytes are not
encrypted; what the key proves is that the gateway has paired these two processes for this attempt.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Mapping
from pathlib import Path

HANDOFF_ID_BYTES = 16


def service_token(secret: str) -> str:
    """The bearer token of internal HTTP. Derived, so that a logged header does not give the secret away."""
    return hmac.new(secret.encode(), b"kvbaton service token v1", hashlib.sha256).hexdigest()


def authorized(secret: str, header: str | None) -> bool:
    """Whether an Authorization header carries the service token; constant time in the token."""
    given = (header or "").encode("latin-1", "replace")
    return hmac.compare_digest(given, b"Bearer " + service_token(secret).encode())


def request_headers(secret: str) -> Mapping[str, str]:
    return {"authorization": f"Bearer {service_token(secret)}"}


CLOCK_SKEW_S = 60.0
"""How far the clocks of two machines may be apart before a key is refused too early."""


def handoff_key(
    secret: str, handoff_id: bytes, attempt: int, prefill_incarnation: str, decode_incarnation: str, expires_at: int
) -> bytes:
    """HMAC-SHA256 over the length-prefixed fields: 32 bytes that only a holder of the secret can make.
    `expires_at` is in seconds of the wall clock."""
    fields = (
        handoff_id,
        struct.pack(">I", attempt),
        prefill_incarnation.encode(),
        decode_incarnation.encode(),
        struct.pack(">Q", expires_at),
    )
    message = b"kvbaton handoff v2" + b"".join(struct.pack(">I", len(field)) + field for field in fields)
    return hmac.new(secret.encode(), message, hashlib.sha256).digest()


def read_secret(secret: str | None, secret_file: Path | None) -> str:
    """The secret itself, from a value or a file. Raises ValueError when there is none or it is too short."""
    if secret_file is not None:
        secret = secret_file.read_text(encoding="utf-8").strip()
    if not secret:
        raise ValueError("a secret is required: set KVBATON__SECRET or --secret-file")
    if len(secret) < 16:
        raise ValueError("the secret must have at least 16 characters")
    return secret

"""The API keys that are known, from a TOML file. On the event loop, but for reading the file.

    [[key]]
    name = "notebooks"                # in logs and metrics
    hash = "sha256:..."               # as `kvbaton key new` prints it; the key itself is nowhere
    tenant = "research"               # tenants never share cached KV; default: the name
    models = ["*"]                    # default: all
    requests_per_minute = 60          # these three: no limit where they are left out
    tokens_per_minute = 100000
    concurrent = 8
    priority = 0                      # lower goes first when every worker is busy

Keys are 256 random bits of ours, so one round of SHA-256 is enough to make a stolen file worthless. A client's key is
compared with every hash in constant time.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from services.file_stamp import stamp
from services.gateway.tenants.limits import Limits, Meter

KEY_PREFIX = "kvb_"
_HASH = re.compile(r"^sha256:[0-9a-f]{64}$")


class KeyFileError(Exception):
    """The file cannot be used; the text says why."""


class KeyEntry(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    name: str = Field(min_length=1, max_length=64)
    hash: str = Field(pattern=_HASH.pattern)
    tenant: str | None = Field(None, min_length=1, max_length=64)
    models: list[str] = ["*"]
    requests_per_minute: int | None = Field(None, ge=1)
    tokens_per_minute: int | None = Field(None, ge=1)
    concurrent: int | None = Field(None, ge=1)
    priority: int = Field(0, ge=-100, le=100)

    @property
    def limits(self) -> Limits:
        return Limits(self.requests_per_minute, self.tokens_per_minute, self.concurrent)


class _File(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    key: list[KeyEntry] = []


class Identity:
    """Who sends a request. Without keys everybody is nobody in particular, with no limits."""

    def __init__(self, entry: KeyEntry | None = None, meter: Meter | None = None) -> None:
        self.name = entry.name if entry else ""
        self.tenant = (entry.tenant or entry.name) if entry else ""
        self.priority = entry.priority if entry else 0
        self.meter = meter or Meter(Limits())
        self._models = frozenset(entry.models) if entry else frozenset({"*"})

    def may_use(self, model: str) -> bool:
        return bool(self._models & {"*", model})

    def cache_domain(self, salt: str) -> bytes:
        """No two pairs of a tenant and a salt have the same."""
        if not self.tenant and not salt:
            return b""
        tenant = self.tenant.encode()
        return len(tenant).to_bytes(2, "big") + tenant + salt.encode()


NOBODY = Identity()


class KeyRing:
    """`path` is read again when it has changed; a file that cannot be used leaves the keys as they were."""

    def __init__(self, path: Path) -> None:
        """Raises KeyFileError."""
        self.path = path
        self._seen = stamp(path)
        self._identities: list[tuple[bytes, Identity]] = []
        self._replace(read_keys(path))

    def find(self, key: str) -> Identity | None:
        digest = hash_key(key).encode()
        found = None
        for known, identity in self._identities:
            if hmac.compare_digest(known, digest):
                found = identity
        return found

    def reload_if_changed(self) -> bool:
        """Raises KeyFileError once for each change that cannot be used."""
        found = stamp(self.path)
        if found == self._seen:
            return False
        self._seen = found
        self._replace(read_keys(self.path))
        return True

    def _replace(self, entries: Sequence[KeyEntry]) -> None:
        """What a key has used stays used, unless its limits are new."""
        meters = {known: identity.meter for known, identity in self._identities}
        identities = []
        for entry in entries:
            meter = meters.get(entry.hash.encode())
            if meter is None or meter.limits != entry.limits:
                meter = Meter(entry.limits)
            identities.append((entry.hash.encode(), Identity(entry, meter)))
        self._identities = identities


def hash_key(key: str) -> str:
    return "sha256:" + hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def new_key() -> str:
    return KEY_PREFIX + secrets.token_urlsafe(32)


def read_keys(path: Path) -> list[KeyEntry]:
    try:
        fields: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
        entries = _File.model_validate(fields).key
    except OSError as error:
        raise KeyFileError(f"cannot read {path}: {error.strerror or error}") from error
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"]))
        raise KeyFileError(f"{path}: {where}: {problem['msg']}") from error
    except ValueError as error:
        raise KeyFileError(f"{path}: {error}") from error
    for what in ("name", "hash"):
        values = [getattr(entry, what) for entry in entries]
        if len(set(values)) != len(values):
            raise KeyFileError(f"{path}: two keys have the same {what}")
    return entries

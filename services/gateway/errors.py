"""What a client can be told. Every one becomes the OpenAI error object, before or after the first byte.

    ApiError                    status, type, param, code
    ├── InvalidRequest   400    the body says something that cannot be served; `param` names the field
    │   └── ContextTooLong      code context_length_exceeded
    ├── Unauthorized     401    no API key, or none that is known
    ├── Forbidden        403    the key may not use this model
    ├── RateLimited      429    the key has used up what it may; carries Retry-After
    ├── NotFound         404    no such route or model
    ├── TooLarge         413    the body is over the limit
    ├── Overloaded       503    no room now; carries Retry-After
    ├── Unavailable      503    no usable workers, or the process is draining; carries Retry-After
    ├── DeadlinePassed   504    the request's time is over
    └── Failed           500    every attempt failed, or a fault of ours

ClientGone is no ApiError: nobody is left to tell.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec


class ApiError(Exception):
    status = 500
    type = "server_error"
    code: str | None = None
    retry_after_s: int | None = None

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, status: int | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code if code is not None else self.code
        self.status = status if status is not None else self.status

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def encoded(self) -> bytes:
        return msgspec.json.encode(self.body())

    def headers(self) -> dict[str, str]:
        return {} if self.retry_after_s is None else {"retry-after": str(self.retry_after_s)}


class InvalidRequest(ApiError):
    status = 400
    type = "invalid_request_error"


class ContextTooLong(InvalidRequest):
    code = "context_length_exceeded"


class Unauthorized(ApiError):
    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"

    def headers(self) -> dict[str, str]:
        return {"www-authenticate": "Bearer"}


class Forbidden(ApiError):
    status = 403
    type = "invalid_request_error"
    code = "model_not_allowed"


class RateLimited(ApiError):
    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = math.ceil(retry_after_s)


class NotFound(ApiError):
    status = 404
    type = "invalid_request_error"


class TooLarge(ApiError):
    status = 413
    type = "invalid_request_error"
    code = "request_too_large"


class Overloaded(ApiError):
    status = 503
    type = "service_unavailable_error"
    code = "overloaded"
    retry_after_s = 1


class Unavailable(ApiError):
    status = 503
    type = "service_unavailable_error"
    code = "service_unavailable"
    retry_after_s = 1


class DeadlinePassed(ApiError):
    status = 504
    type = "timeout_error"
    code = "deadline_exceeded"


class Failed(ApiError):
    code = "internal_error"


class ClientGone(Exception):
    """The client closed its connection, or stopped reading for too long."""

    def __init__(self, reason: str = "closed its connection") -> None:
        super().__init__(reason)
        self.reason = reason

"""What can go wrong inside the engine.

    EngineError
    ├── ConfigError          a model directory or an engine setting that cannot work; names the field
    │   └── CheckpointError  a tensor missing, unknown or of the wrong shape; names the tensor
    ├── InvalidRequest       a request that no pool state could ever serve; carries the offending field
    └── EngineDead           the step loop ended with an exception; nothing more will be computed

A full pool is a value (`Refused`), not an exception.
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of everything the engine raises on purpose."""


class ConfigError(EngineError):
    """A model directory or an engine setting that cannot work."""


class CheckpointError(ConfigError):
    """A tensor that is missing, unknown or of the wrong shape."""


class InvalidRequest(EngineError):
    """A request that can never be served. `param` names the field at fault."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class EngineDead(EngineError):
    """The engine thread ended with an exception."""

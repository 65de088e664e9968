"""Tells whether a file is still the one that was read."""

from __future__ import annotations

from pathlib import Path

Stamp = tuple[int, ...]


def stamp(path: Path) -> Stamp:
    """Changes with the file, a symbolic link that is turned elsewhere included. Empty where it cannot be looked at."""
    try:
        status = path.stat()
    except OSError:
        return ()
    return status.st_mtime_ns, status.st_size, status.st_ino

"""The certificate of the public port, read again when its files change. On the event loop.

A connection takes the context that is current when it says hello, so one that is open keeps its own, and files that do
not fit together (one replaced, the other not yet) change nothing: each context is built whole before it is used.
"""

from __future__ import annotations

import logging
import ssl
import time
from pathlib import Path
from typing import Any

from services.file_stamp import Stamp, stamp

logger = logging.getLogger(__name__)
CHECK_S = 1.0
"""Files are looked at once in so many seconds, and only when somebody connects."""


class ReloadingCertificate:
    """Makes the context of a listener; files that cannot be read raise OSError (ssl.SSLError is one)."""

    def __init__(self, cert: Path, key: Path) -> None:
        self._files = (cert, key)
        self._seen = self._stamps()
        self._current = self._read()
        self._next_check = time.monotonic() + CHECK_S

    def listening_context(self) -> ssl.SSLContext:
        context = self._read()
        context.sni_callback = self._take_current
        return context

    def _take_current(self, connection: Any, _name: str | None, _context: ssl.SSLContext) -> None:
        """Called at each hello, also where it names no server."""
        if time.monotonic() >= self._next_check:
            self._next_check = time.monotonic() + CHECK_S
            self._reload_if_changed()
        connection.context = self._current

    def _reload_if_changed(self) -> None:
        stamps = self._stamps()
        if stamps == self._seen:
            return
        self._seen = stamps
        try:
            self._current = self._read()
            logger.info("TLS certificate read again from %s", self._files[0])
        except OSError as error:
            logger.error("the TLS certificate stays as it was: %s", error)

    def _read(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(*self._files)
        return context

    def _stamps(self) -> tuple[Stamp, ...]:
        return tuple(stamp(path) for path in self._files)

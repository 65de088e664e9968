"""A worker process from start to end: load the model, start the engine thread, open and probe the fabric, serve.

The HTTP listener is up before the model is: probes see "loading" and how far it is, never a refused connection.
Ready means that a token can be made and that KV has really moved over the fabric.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import uuid
from typing import TYPE_CHECKING, Any

from engine.errors import ConfigError, EngineError, InvalidRequest
from engine.messages import LedgerSnapshot
from services.lifecycle import parse_address
from services.protocol import PROTOCOL_VERSION, Failure, Fingerprint, WorkerInfo
from services.worker import ledger_report
from services.worker.config import WorkerConfig
from services.worker.engine_client import EngineClient
from services.worker.fault_shim import FaultShim
from transport.errors import TransportError
from transport.layout import KvLayout
from transport.messages import Hello
from transport.plane import Plane
from transport.probe import ProbeResult, probe
from transport.receiver import KvReceiver
from transport.sender import KvSender

if TYPE_CHECKING:
    from engine.grammar import Grammars
    from engine.loop import EngineThread
    from services.decode.service import DecodeService
    from services.prefill.service import PrefillService

logger = logging.getLogger(__name__)
STOP_S = 5.0
PROBE_TOKENS = 16
FINISH_REASONS = ("stop", "length", "abort", "error", "released")
GRAMMAR_S = 10.0
"""Longest a request waits for its grammar to be compiled."""


class StartFailed(Exception):
    """The worker cannot serve; the text says why."""


class Worker:
    """Owned by the process's event loop. `failure` is set when the process must end with status 1."""

    def __init__(self, config: WorkerConfig) -> None:
        self.config = config
        self.incarnation = uuid.uuid4().hex
        self.state: str = "loading"
        self.failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.engine = EngineClient(asyncio.get_running_loop(), self._fail)
        self.prefill: PrefillService | None = None
        self.decode: DecodeService | None = None
        self.probe_result: ProbeResult | None = None
        self._load_progress = 0.0
        self._thread: EngineThread | None = None
        self.faults = FaultShim(config.test_faults) if config.test_faults is not None else None
        self._grammars: Grammars | None = None
        self._compiling = asyncio.Lock()
        self._plane: Plane | None = None
        self._receiver: KvReceiver | None = None
        self._sender: KvSender | None = None
        self._fingerprint: Fingerprint | None = None
        self._capacity_tokens = 0
        self._block_size = 0

    async def start(self) -> None:
        """Load, open the fabric, probe it. Raises nothing: a failure is logged and set on `failure`."""
        try:
            started = time.monotonic()
            layout = await self._start_engine()
            await self._start_fabric(layout)
        except (EngineError, TransportError, OSError, RuntimeError, StartFailed) as error:
            logger.debug("start-up failed", exc_info=True)
            self._fail(f"{type(error).__name__}: {error}")
            return
        self.state = "ready"
        logger.info("ready in %.1f s", time.monotonic() - started)

    def drain(self) -> None:
        if self.state == "ready":
            self.state = "draining"
            if self.decode is not None:
                asyncio.get_running_loop().call_later(self.config.leave_after_s, self.decode.departure.announce)
            logger.info("draining: %d requests in hand", self.engine.num_open)

    def is_idle(self) -> bool:
        return self.engine.num_open == 0

    async def close(self) -> None:
        """Every wait here is bounded; what does not end in time is left to the end of the process."""
        for part in (self._sender, self._receiver, self._plane):
            if part is not None:
                try:
                    await asyncio.wait_for(part.close(), STOP_S)
                except (TimeoutError, TransportError) as error:
                    logger.warning("closing %s: %r", type(part).__name__, error)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.stop, STOP_S)
            self.engine.stopped()

    def info(self) -> WorkerInfo:
        ledger = self.ledger()
        return WorkerInfo(
            role=self.config.role,
            incarnation=self.incarnation,
            state=self.state,  # type: ignore[arg-type]
            model_name=self.config.model_name,
            load_progress=self._load_progress,
            message=self.failure.result() if self.failure.done() else "",
            fingerprint=self._fingerprint,
            fabric_address=self._receiver.address if self._receiver is not None else "",
            lane=self.probe_result.lane if self.probe_result is not None else "",
            block_size=self._block_size,
            num_blocks=ledger.num_blocks if ledger else 0,
            capacity_tokens=self._capacity_tokens,
            num_free_blocks=ledger.free + ledger.cached if ledger else 0,
            num_requests=self.engine.num_open,
        )

    async def prepare_grammar(self, grammar: str) -> Failure | None:
        """Compile it on a thread, one at a time, before the engine needs it. Returns why a request cannot have it."""
        if not grammar:
            return None
        assert self._grammars is not None, "only a worker that is ready is asked"
        try:
            async with asyncio.timeout(GRAMMAR_S), self._compiling:
                await asyncio.to_thread(self._grammars.prepare, grammar)
        except InvalidRequest as error:
            return Failure(message=str(error), kind="invalid", param=error.param)
        except (ConfigError, TimeoutError) as error:
            return Failure(message=str(error) or "the grammar took too long to compile", kind="internal")
        return None

    def ledger(self) -> LedgerSnapshot | None:
        return self._thread.ledger() if self._thread is not None else None

    def report(self) -> dict[str, Any]:
        """For /debug/ledger and the metrics."""
        progress = self._thread.progress() if self._thread is not None else (0.0, 0.0)
        return {
            "incarnation": self.incarnation,
            "open_streams": self.engine.num_open,
            "finished": {reason: self.engine.num_finished[reason] for reason in FINISH_REASONS},
            "lane": self.probe_result.lane if self.probe_result else "",
            **ledger_report.report(self.ledger(), self._receiver, self._sender, progress),
        }

    def _fail(self, reason: str) -> None:
        self.state = "failed"
        if not self.failure.done():
            self.failure.set_result(reason)

    async def _start_engine(self) -> KvLayout:
        from services.worker.engine_start import start_engine  # torch: not before the listener is up

        if self.config.cores:
            os.sched_setaffinity(0, self.config.cores)

        def progress(done: int, total: int) -> None:
            self._load_progress = min(1.0, done / max(1, total))

        before_step = self.faults.before_step if self.faults is not None else None
        started = await asyncio.to_thread(start_engine, self.config, self.engine.deliver, progress, before_step)
        self._thread = started.thread
        self._grammars = started.grammars
        self.engine.attach(started.thread)
        self._load_progress = 1.0
        self._capacity_tokens = started.engine_config.capacity_tokens
        self._block_size = started.engine_config.block_size
        self._fingerprint = Fingerprint(
            wire_version=PROTOCOL_VERSION,
            model=started.model_fingerprint,
            dtype=started.dtype,
            num_layers=started.num_layers,
            num_kv_heads=started.num_kv_heads,
            head_dim=started.head_dim,
        )
        return KvLayout(
            num_layers=started.num_layers,
            num_kv_heads=started.num_kv_heads,
            head_dim=started.head_dim,
            dtype=started.dtype,
        )

    async def _start_fabric(self, layout: KvLayout) -> None:
        from services.decode.service import DecodeService
        from services.prefill.service import PrefillService

        config = self.config
        assert self._fingerprint is not None
        host, port = parse_address(config.fabric_listen)
        plane = self._plane = await _open_plane(config, host, port)
        self.probe_result = await probe(plane, layout, PROBE_TOKENS)
        if self.faults is not None:
            logger.warning("faults are injected on purpose: --test-faults")
            plane = self.faults.wrap(plane)
        logger.info(
            "fabric probe: %d bytes moved over %s in %.1f ms",
            self.probe_result.num_bytes,
            self.probe_result.lane,
            self.probe_result.seconds * 1e3,
        )
        hello = Hello(
            incarnation=self.incarnation,
            fingerprint={name: getattr(self._fingerprint, name) for name in self._fingerprint.__struct_fields__},
        )
        shared = {
            "secret": config.secret_value,
            "incarnation": self.incarnation,
            "max_queued": config.max_queued,
        }
        self._sender = KvSender(
            plane, layout, hello, max_segment_bytes=config.max_segment_bytes, silence_s=config.fabric_silence_s
        )
        if config.role in ("decode", "both"):
            self._receiver = KvReceiver(
                plane,
                layout,
                hello,
                max_segment_bytes=config.max_segment_bytes,
                max_staging_bytes=config.max_staging_bytes,
            )
            await self._receiver.start()
            self.decode = DecodeService(self.engine, self._receiver, self._sender, **shared)  # type: ignore[arg-type]
            logger.info("fabric listens on %s", self._receiver.address)
        if config.role in ("prefill", "both"):
            self.prefill = PrefillService(self.engine, self._sender, **shared)  # type: ignore[arg-type]


async def _open_plane(config: WorkerConfig, host: str, port: int) -> Plane:
    if config.fabric == "inproc":
        from transport.inproc import InprocPlane

        return InprocPlane()
    from transport.ucx import UcxPlane

    return UcxPlane(host=host, port=port, advertise=config.advertise)

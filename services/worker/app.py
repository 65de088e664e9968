"""The internal HTTP API of a worker: never on a public port, and only for holders of the service token.

GET  /health        the process is alive; open to probes
GET  /ready         200 once a token can be made and the fabric has carried KV; open to probes
GET  /metrics       Prometheus; open
GET  /v1/worker     WorkerInfo
POST /v1/generate   decode and both
POST /v1/prefill    prefill and both
POST /v1/hold       decode and both: stop a stream to move it, or let it go on
POST /v1/ship       decode and both: ship the KV of a stream that is held
GET  /debug/ledger  blocks, requests, leases and transfers by state, with ages
PUT  /debug/faults  only with --test-faults: the faults from now on, as text; answers what was injected so far
"""

from __future__ import annotations

import resource
from collections.abc import Callable

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from services import auth, protocol
from services.protocol import Busy, GenerateRequest, PrefillRequest, ProtocolError, ShipRequest
from services.worker import metrics
from services.worker.frame_stream import FrameStream
from services.worker.worker import Worker

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics"})


def create_app(worker: Worker) -> ASGIApp:
    registry = metrics.registry(
        metrics.WorkerCollector(
            report=worker.report,
            labels=lambda: {
                "role": worker.config.role,
                "incarnation": worker.incarnation,
                "fabric": worker.config.fabric,
                "lane": worker.info().lane,
            },
        )
    )

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "ok"}, status_code=500 if worker.state == "failed" else 200)

    async def ready(_: Request) -> Response:
        return JSONResponse({"state": worker.state}, status_code=200 if worker.state == "ready" else 503)

    async def metrics_page(_: Request) -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    async def info(_: Request) -> Response:
        return Response(protocol.encode(worker.info()), media_type="application/msgpack")

    async def ledger(_: Request) -> Response:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return JSONResponse(worker.report() | {"cpu_s": usage.ru_utime + usage.ru_stime})

    async def generate(request: Request) -> Response | FrameStream:
        return await _stream(
            request, worker, protocol.decode_generate, lambda: worker.decode and worker.decode.generate
        )

    async def prefill(request: Request) -> Response | FrameStream:
        return await _stream(
            request, worker, protocol.decode_prefill, lambda: worker.prefill and worker.prefill.prefill
        )

    async def hold(request: Request) -> Response:
        return await _hold(request, worker)

    async def ship(request: Request) -> Response | FrameStream:
        return await _stream(
            request,
            worker,
            protocol.decode_ship,
            lambda: worker.decode and worker.decode.departure.ship,
            also_draining=True,
        )

    async def faults(request: Request) -> Response:
        assert worker.faults is not None
        injected = worker.faults.injected()
        try:
            if request.method == "PUT":
                worker.faults.set((await _body(request)).decode())
        except (ProtocolError, ValueError) as error:
            return JSONResponse({"error": str(error)}, status_code=400)
        return JSONResponse(injected)

    routes = [
        Route("/health", health),
        Route("/ready", ready),
        Route("/metrics", metrics_page),
        Route("/v1/worker", info),
        Route("/debug/ledger", ledger),
        Route("/v1/generate", generate, methods=["POST"]),
        Route("/v1/prefill", prefill, methods=["POST"]),
        Route("/v1/hold", hold, methods=["POST"]),
        Route("/v1/ship", ship, methods=["POST"]),
    ]
    if worker.faults is not None:
        routes.append(Route("/debug/faults", faults, methods=["GET", "PUT"]))
    return ServiceTokenRequired(Starlette(routes=routes), worker.config.secret_value)


class ServiceTokenRequired:
    """Deny by default: every path but the open ones needs the token, before a byte of the body is read."""

    def __init__(self, app: ASGIApp, secret: str) -> None:
        self._app = app
        self._secret = secret

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            given = dict(scope["headers"]).get(b"authorization", b"").decode("latin-1")
            if not auth.authorized(self._secret, given):
                await JSONResponse({"error": "a service token is required"}, status_code=401)(scope, receive, send)
                return
        await self._app(scope, receive, send)


async def _hold(request: Request, worker: Worker) -> Response:
    if worker.decode is None:
        return JSONResponse({"error": f"this {worker.config.role} worker is {worker.state}"}, status_code=503)
    try:
        message = protocol.decode_hold(await _body(request))
    except ProtocolError as error:
        return JSONResponse({"error": str(error)}, status_code=400)
    frame = await worker.decode.departure.hold(message)
    return Response(protocol.encode_frame(frame), media_type=protocol.FRAMES_MEDIA_TYPE)


async def _stream(
    request: Request,
    worker: Worker,
    decode: Callable[[bytes], GenerateRequest | PrefillRequest | ShipRequest],
    service: Callable[[], object],
    *,
    also_draining: bool = False,
) -> Response | FrameStream:
    handle = service()
    if worker.state == "draining" and not also_draining:
        return Response(protocol.encode_frame(Busy(message="draining")), media_type=protocol.FRAMES_MEDIA_TYPE)
    if worker.state not in ("ready", "draining") or handle is None:
        return JSONResponse({"error": f"this {worker.config.role} worker is {worker.state}"}, status_code=503)
    try:
        message = decode(await _body(request))
    except ProtocolError as error:
        return JSONResponse({"error": str(error)}, status_code=400)
    grammar = "" if isinstance(message, ShipRequest) else message.work.sampling.grammar
    if (problem := await worker.prepare_grammar(grammar)) is not None:
        return Response(protocol.encode_frame(problem), media_type=protocol.FRAMES_MEDIA_TYPE)
    if worker.state == "draining" and not also_draining:  # meanwhile
        return Response(protocol.encode_frame(Busy(message="draining")), media_type=protocol.FRAMES_MEDIA_TYPE)
    return FrameStream(handle(message))  # type: ignore[operator]


async def _body(request: Request) -> bytes:
    """At most MAX_FRAME_BYTES, counted while they arrive, whatever the headers say."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > protocol.MAX_FRAME_BYTES:
            raise ProtocolError(f"a body over the limit of {protocol.MAX_FRAME_BYTES} bytes")
    return bytes(body)

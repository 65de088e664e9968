"""The gateway's two HTTP applications: the public OpenAI API, and the admin API that belongs on no public port."""

from __future__ import annotations

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from services.gateway.anthropic.api import MessagesApi
from services.gateway.endpoints import json_response, small_routes
from services.gateway.errors import ApiError, InvalidRequest, NotFound
from services.gateway.gateway import VERSION, Gateway
from services.gateway.generation import GenerationEndpoint
from services.gateway.openai.chat import ChatApi, ChatPlanner
from services.gateway.openai.common import ServedModel
from services.gateway.openai.completions import CompletionApi
from services.gateway.openapi import openapi_document
from services.gateway.request_id import RequestIds
from services.gateway.responses.api import ResponsesApi
from services.gateway.tenants.guard import Guard

MAX_LISTED = 100
EXPOSED_HEADERS = ["x-request-id", "retry-after"] + [
    f"x-ratelimit-{what}-{unit}" for what in ("limit", "remaining", "reset") for unit in ("requests", "tokens")
]


def create_public_app(gateway: Gateway) -> ASGIApp:
    app = _app()
    served = ServedModel(gateway.config.model_name, gateway.text)
    planner = ChatPlanner(served, gateway.output_format)

    document = openapi_document(VERSION, gateway.config.model_name, needs_key=gateway.keys is not None)

    async def openapi(_: Request) -> Response:
        return json_response(document)

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(_: Request) -> Response:
        return JSONResponse({"ready": gateway.ready}, status_code=200 if gateway.ready else 503)

    app.router.routes += [
        Route("/health", health),
        Route("/ready", ready),
        Route("/v1/chat/completions", GenerationEndpoint(gateway, ChatApi(planner)), methods=["POST"]),
        Route("/v1/completions", GenerationEndpoint(gateway, CompletionApi(served)), methods=["POST"]),
        Route("/v1/responses", GenerationEndpoint(gateway, ResponsesApi(planner)), methods=["POST"]),
        Route("/v1/messages", GenerationEndpoint(gateway, MessagesApi(planner)), methods=["POST"]),
        *small_routes(gateway, planner),
        Route("/openapi.json", openapi),
    ]
    if gateway.config.public_metrics:
        app.router.routes.append(_metrics_route(gateway))
    guarded: ASGIApp = Guard(app, gateway.keys)
    if gateway.config.cors_origins:
        guarded = CORSMiddleware(
            guarded,
            allow_origins=gateway.config.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=EXPOSED_HEADERS,
        )
    return RequestIds(guarded)


def create_admin_app(gateway: Gateway) -> ASGIApp:
    app = _app()

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def requests(_: Request) -> Response:
        return json_response([timeline.body() for timeline in gateway.timelines.latest(MAX_LISTED)])

    async def one_request(request: Request) -> Response:
        timeline = gateway.timelines.find(request.path_params["request_id"])
        if timeline is None:
            raise NotFound("no such request among those still remembered")
        return json_response(timeline.body())

    async def cluster(_: Request) -> Response:
        return json_response({"workers": gateway.cluster.describe(), "num_queued": gateway.admission.num_queued})

    app.router.routes += [
        Route("/health", health),
        Route("/debug/requests", requests),
        Route("/debug/requests/{request_id}", one_request),
        Route("/debug/cluster", cluster),
        _metrics_route(gateway),
    ]
    return RequestIds(app)


def _app() -> FastAPI:
    app = FastAPI(title="kvbaton", docs_url=None, redoc_url=None, openapi_url=None)
    app.router.redirect_slashes = False
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    return app


def _metrics_route(gateway: Gateway) -> Route:
    async def metrics(_: Request) -> Response:
        return Response(generate_latest(gateway.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    return Route("/metrics", metrics)


async def _on_api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body(), error.status, error.headers())


async def _on_http_error(request: Request, error: Exception) -> Response:
    """A wrong path or method, in the same shape as every other error."""
    assert isinstance(error, HTTPException)
    message = f"{error.detail}: {request.method} {request.url.path}"
    body = InvalidRequest(message, status=error.status_code).body()
    return JSONResponse(body, error.status_code, dict(error.headers or {}))

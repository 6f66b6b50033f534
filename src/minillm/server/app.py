"""The web application: routes, middleware, and every error as an OpenAI error object."""

from __future__ import annotations

from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import Route

import minillm
from minillm.server import sse
from minillm.server.chat import Chat
from minillm.server.completions import Completions
from minillm.server.config import ServerConfig
from minillm.server.dashboard import Dashboard
from minillm.server.errors import ApiError, as_api_error
from minillm.server.exposition import Exposition, HttpMetrics
from minillm.server.gate import Gate
from minillm.server.generation import ReaderEndpoint
from minillm.server.openapi import document
from minillm.server.state import ServerState

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from minillm.engine.runtime import Runtime
    from minillm.server.metrics import EngineMetrics


def create_app(runtime: Runtime, config: ServerConfig | None = None, metrics: EngineMetrics | None = None) -> FastAPI:
    """The application around a running engine. `app.state.server` is its :class:`ServerState`.

    `metrics` is the runtime's observer; without it there is no /metrics and no /dashboard. The caller closes the
    runtime, after the application has ended.
    """
    state = ServerState(runtime, config or ServerConfig())
    exposition = dashboard = None
    if metrics is not None:
        name = state.model_names[0]
        exposition = Exposition(runtime, metrics, model_name=name, prefix=state.config.metrics_prefix)
        dashboard = Dashboard(runtime, metrics, model_name=name, show_text=state.config.show_prompts)
        state.on_drain.append(dashboard.end_streams)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        if exposition is not None and dashboard is not None:
            exposition.close()
            dashboard.close()
        await state.close()

    app = FastAPI(
        title="MiniLLM Runtime",
        version=minillm.__version__,
        lifespan=lifespan,
        docs_url=None,  # the page would load scripts from another host
        redoc_url=None,
        redirect_slashes=False,  # a POST that is redirected loses its body with many clients
    )
    app.state.server = state
    app.openapi = lambda: document(app)  # type: ignore[method-assign]
    _add_routes(app, state)
    _add_error_handlers(app)
    if exposition is not None and dashboard is not None:
        app.state.dashboard = dashboard
        app.include_router(dashboard.router())
        app.add_route("/metrics", exposition.endpoint)
        app.add_middleware(HttpMetrics, registry=exposition.registry)
    app.add_middleware(Gate, api_keys=state.config.api_keys)
    if state.config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(state.config.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],  # the official client sends a dozen of its own (x-stainless-...)
            expose_headers=["x-request-id", "retry-after"],
        )
    return app


def _add_routes(app: FastAPI, state: ServerState) -> None:
    for path, endpoint in (
        ("/v1/completions", Completions(state)),
        ("/v1/chat/completions", Chat(state)),
        ("/tokenize", ReaderEndpoint(state, "tokenize")),
        ("/detokenize", ReaderEndpoint(state, "detokenize")),
    ):
        app.router.routes.append(Route(path, endpoint, methods=["POST"]))

    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> Response:
        """200 while requests are taken, 503 while the server drains or if its engine is dead."""
        try:
            state.check_open()
        except ApiError as error:
            return error_response(error)
        return json_response({"status": "ok"})

    @app.get("/version")
    async def version() -> Response:
        """The version of the runtime."""
        return json_response({"version": minillm.__version__})

    @app.get("/v1/models")
    async def models() -> Response:
        """The names under which the model is served."""
        return json_response({"object": "list", "data": [state.model_card(name) for name in state.model_names]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        """One of them."""
        state.intake.tools.check_model(name)
        return json_response(state.model_card(name))


def _add_error_handlers(app: FastAPI) -> None:
    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        reason = HTTPStatus(error.status_code).phrase.lower()
        text = str(error.detail) if error.detail and str(error.detail).lower() != reason else ""
        if error.status_code in (404, 405):
            text = f"{request.method} {request.url.path[:200]}: {reason}"
        headers = dict(error.headers or {})
        return error_response(ApiError(error.status_code, text or reason, headers=headers))

    async def on_validation_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first: dict[str, Any] = dict(error.errors()[0])
        param = ".".join(str(part) for part in first.get("loc", ())[1:]) or None
        return error_response(ApiError(400, f"{param}: {first.get('msg')}", param=param, code="invalid_value"))

    async def on_error(request: Request, error: Exception) -> Response:
        return error_response(as_api_error(error))

    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(RequestValidationError, on_validation_error)
    app.add_exception_handler(ApiError, on_error)
    app.add_exception_handler(Exception, on_error)


def json_response(value: Any, status: int = 200) -> Response:
    """A JSON answer."""
    return Response(sse.encode(value), status, media_type="application/json")


def error_response(error: ApiError) -> Response:
    """An error object as a Starlette response."""
    return Response(error.body(), error.status, headers=error.headers, media_type="application/json")

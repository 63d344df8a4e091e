"""FastAPI application: routers, error handlers and middleware."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

import anyaccel
from anyaccel.server.http.audio_api import router as audio_router
from anyaccel.server.http.docs_page import router as docs_router
from anyaccel.server.http.errors import ApiError, describe_invalid, make_response
from anyaccel.server.http.images_api import router as images_router
from anyaccel.server.http.jobs_api import router as jobs_router
from anyaccel.server.http.loras_api import router as loras_router
from anyaccel.server.http.middleware import RequestMiddleware
from anyaccel.server.http.service import Service
from anyaccel.server.http.status_api import router as status_router
from anyaccel.server.http.videos_api import router as videos_router
from anyaccel.server.http.web_page import router as page_router

__all__ = ["make_app"]


def make_app(service: Service) -> FastAPI:
    """Return the FastAPI application for a service; its lifespan handler starts and stops the worker."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.dispatcher.start()
        yield
        await run_in_threadpool(service.close)  # in a thread, because it waits for the worker to exit

    app = FastAPI(
        title="anyaccel",
        version=anyaccel.__version__,
        summary="Images, videos and audio from diffusion pipelines on any accelerator.",
        lifespan=lifespan,
        # Replaced by `docs_page`, which works on machines without internet access.
        docs_url=None,
        redoc_url=None,
        openapi_url="/openapi.json",
    )
    app.state.service = service
    for router in (
        images_router,
        videos_router,
        audio_router,
        jobs_router,
        loras_router,
        status_router,
        page_router,
        docs_router,
    ):
        app.include_router(router)
    _add_exception_handlers(app)
    app.add_middleware(RequestMiddleware, service=service)
    return app


def _add_exception_handlers(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def handle_api_error(request: Request, error: ApiError) -> Response:
        return make_response(error)

    @app.exception_handler(RequestValidationError)
    async def handle_validation_error(request: Request, error: RequestValidationError) -> Response:
        return make_response(describe_invalid(error))

    @app.exception_handler(HTTPException)
    async def handle_http_error(request: Request, error: HTTPException) -> Response:
        # Raised by Starlette itself, for example for an unknown path. Clients expect the same JSON for every error.
        codes = {404: "unknown_url", 405: "method_not_allowed"}
        code = codes.get(error.status_code, "invalid_request")
        return make_response(ApiError(error.status_code, code, str(error.detail), headers=error.headers))

    @app.exception_handler(Exception)
    async def handle_unexpected_error(request: Request, error: Exception) -> Response:
        return make_response(ApiError(500, "internal_error", "internal error; see the service log"))

"""The app: all endpoints of a service behind its gate."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

import anyaccel
from anyaccel.server.http.errors import ApiError, describe_invalid, make_answer
from anyaccel.server.http.images_api import router as images_router
from anyaccel.server.http.jobs_api import router as jobs_router
from anyaccel.server.http.middleware import RequestMiddleware
from anyaccel.server.http.service import Service
from anyaccel.server.http.status_api import router as state_router
from anyaccel.server.http.web_page import router as page_router

__all__ = ["make_app"]


def make_app(service: Service) -> FastAPI:
    """Everything under one roof; the worker is started with it and ends with it."""

    @asynccontextmanager
    async def living(app: FastAPI) -> AsyncIterator[None]:
        service.dispatcher.start()
        yield
        await run_in_threadpool(service.close)

    app = FastAPI(
        title="anyaccel",
        version=anyaccel.__version__,
        summary="Pictures from any diffusion pipeline on any accelerator.",
        lifespan=living,
        docs_url=None,
        redoc_url=None,
        openapi_url="/openapi.json",
    )
    app.state.service = service
    for router in (images_router, jobs_router, state_router, page_router):
        app.include_router(router)
    _add_errors(app)
    app.add_middleware(RequestMiddleware, service=service)
    return app


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def tell(request: Request, error: ApiError) -> Response:
        return make_answer(error)

    @app.exception_handler(RequestValidationError)
    async def tell_invalid(request: Request, error: RequestValidationError) -> Response:
        return make_answer(describe_invalid(error))

    @app.exception_handler(HTTPException)
    async def tell_http(request: Request, error: HTTPException) -> Response:
        codes = {404: "unknown_url", 405: "method_not_allowed"}
        code = codes.get(error.status_code, "invalid_request")
        return make_answer(ApiError(error.status_code, code, str(error.detail), headers=error.headers))

    @app.exception_handler(Exception)
    async def tell_fault(request: Request, error: Exception) -> Response:
        return make_answer(ApiError(500, "internal_error", "this is a fault of the service's; its log says more"))

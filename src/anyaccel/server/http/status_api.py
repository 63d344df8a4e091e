"""The endpoints that tell how the service is."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.concurrency import run_in_threadpool

import anyaccel
from anyaccel.server.http.service import Service, ServiceOf

__all__ = ["router"]

router = APIRouter()
_LIMITS = ("max_queue", "max_n", "max_steps", "max_pixels", "max_prompt")


@router.get("/healthz", summary="Whether the service is alive")
async def is_alive() -> dict[str, str]:
    """It is, if this is answered."""
    return {"status": "alive"}


@router.get(
    "/readyz",
    response_model=None,
    summary="Whether all models are loaded and their sizes warm",
    responses={503: {"description": "Not yet, or no longer"}},
)
async def is_ready(service: ServiceOf) -> Response:
    """How far the start is."""
    start = service.dispatcher.start_state
    told = {"status": _find_state(service), "doing": start.words, "done": start.done, "total": start.total}
    return JSONResponse(told, 200 if service.dispatcher.is_ready() and not service.draining else 503)


@router.get(
    "/metrics",
    response_class=PlainTextResponse,
    summary="Figures for Prometheus",
    responses={401: {"description": "The key is wrong"}},
)
async def show_metrics(service: ServiceOf) -> Response:
    """In Prometheus' own format."""
    text = await run_in_threadpool(service.metrics.text)
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/v1/status", summary="The device, its plan, the queue and the limits")
async def show_status(service: ServiceOf) -> dict[str, Any]:
    """What the page shows beside the pictures."""
    dispatcher = service.dispatcher
    models = [
        {"name": facts.name, "device": facts.device, "virtual": facts.virtual, "plan": facts.plan}
        for facts in dispatcher.models.values()
    ]
    return {
        "version": anyaccel.__version__,
        "state": _find_state(service),
        "doing": dispatcher.start_state.words,
        "done": dispatcher.start_state.done,
        "total": dispatcher.start_state.total,
        "queued": await run_in_threadpool(service.jobs.count, "queued"),
        "running": await run_in_threadpool(service.jobs.count, "running"),
        "models": models,
        "limits": {name: getattr(service.settings.limits, name) for name in _LIMITS},
    }


def _find_state(service: Service) -> str:
    return "ending" if service.draining else service.dispatcher.start_state.state

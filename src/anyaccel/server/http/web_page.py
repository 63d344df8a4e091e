"""The page at `/`: plain files that come with the package, and nothing from elsewhere."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from fastapi import APIRouter
from fastapi.responses import Response

__all__ = ["router"]

router = APIRouter(include_in_schema=False)
_HEADERS = {
    "cache-control": "no-cache",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
}


@cache
def _read(name: str) -> bytes:
    return (files("anyaccel.server.http") / "page_files" / name).read_bytes()


@router.get("/", response_model=None)
async def show_page() -> Response:
    """The page itself."""
    return Response(_read("index.html"), media_type="text/html; charset=utf-8", headers=_HEADERS)


@router.get("/page.css", response_model=None)
async def show_style() -> Response:
    """How it looks."""
    return Response(_read("page.css"), media_type="text/css; charset=utf-8", headers=_HEADERS)


@router.get("/page.js", response_model=None)
async def show_script() -> Response:
    """What it does."""
    return Response(_read("page.js"), media_type="text/javascript; charset=utf-8", headers=_HEADERS)

"""Web page at `/`, served from static files in the package, without external resources."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from fastapi import APIRouter
from fastapi.responses import Response

__all__ = ["PAGE_HEADERS", "router"]

router = APIRouter(include_in_schema=False)
# The page shows prompts and images of several users: no inline scripts, no other origins, no framing.
PAGE_HEADERS = {
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
    """Return the web page's HTML."""
    return Response(_read("index.html"), media_type="text/html; charset=utf-8", headers=PAGE_HEADERS)


@router.get("/page.css", response_model=None)
async def show_style() -> Response:
    """Return the web page's stylesheet."""
    return Response(_read("page.css"), media_type="text/css; charset=utf-8", headers=PAGE_HEADERS)


@router.get("/docs.css", response_model=None)
async def show_docs_style() -> Response:
    """Return the stylesheet of the page that describes the API."""
    return Response(_read("docs.css"), media_type="text/css; charset=utf-8", headers=PAGE_HEADERS)


@router.get("/page.js", response_model=None)
async def show_script() -> Response:
    """Return the web page's JavaScript."""
    return Response(_read("page.js"), media_type="text/javascript; charset=utf-8", headers=PAGE_HEADERS)

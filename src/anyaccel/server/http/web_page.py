"""Web page at `/`, served from static files in the package, without external resources."""

from __future__ import annotations

from importlib.resources import files
from pathlib import PurePosixPath

from fastapi import APIRouter
from fastapi.responses import Response

__all__ = ["PAGE_HEADERS", "PAGE_PATHS", "router"]

router = APIRouter(include_in_schema=False)
# The page shows prompts and results of several users: no inline scripts, no other origins, no framing.
PAGE_HEADERS = {
    "cache-control": "no-cache",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data: blob:; media-src 'self' blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
}
_MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_FOLDER = files("anyaccel.server.http") / "page_files"
# From the folder, never from a request: a path in a request could name any file.
_FILES = {
    "/" if file.name == "index.html" else f"/{file.name}": file
    for file in _FOLDER.iterdir()
    if PurePosixPath(file.name).suffix in _MEDIA_TYPES
}
PAGE_PATHS = frozenset(_FILES)
"""Paths of the page's files, which need no API key."""


def _add_route(path: str) -> None:
    file = _FILES[path]
    media_type = f"{_MEDIA_TYPES[PurePosixPath(file.name).suffix]}; charset=utf-8"

    @router.get(path, response_model=None)
    def show_file() -> Response:
        return Response(file.read_bytes(), media_type=media_type, headers=PAGE_HEADERS)


for _path in sorted(_FILES):
    _add_route(_path)

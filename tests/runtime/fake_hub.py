"""A local server that answers as the Hugging Face Hub, for one repository, with injected failures."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

__all__ = ["COMMIT", "REPOSITORY", "FakeHub", "serving"]

REPOSITORY = "tests/tiny"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class FakeHub:
    """The files of the repository, the failures and the downloads."""

    folder: Path
    url: str = ""
    cut: dict[str, int] = field(default_factory=dict)
    """The connection is closed after this number of bytes, the first time that a file is downloaded."""
    status: dict[str, int] = field(default_factory=dict)
    """Files whose download is answered with this status. 403 stands for a gated repository."""
    downloads: list[tuple[str, int]] = field(default_factory=list)
    """Each download: the file and the position of its first byte."""

    def list_files(self) -> list[str]:
        """Return the paths of all files in the repository."""
        return sorted(str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.is_file())

    def read_downloads(self) -> list[str]:
        """Return the names of the downloaded files, and forget them."""
        names = [name for name, _ in self.downloads]
        self.downloads.clear()
        return names


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def _answer(self, *, body: bool) -> None:
        path = self.path.split("?")[0]
        if match := re.fullmatch(f"/{REPOSITORY}/resolve/[^/]+/(.+)", path):
            self._send_file(match[1], body=body)
        elif re.fullmatch(f"/api/models/{REPOSITORY}(/revision/[^/]+)?", path):
            files = [{"rfilename": name} for name in self.hub.list_files()]
            self._send_json({"id": REPOSITORY, "sha": COMMIT, "siblings": files})
        elif re.fullmatch(f"/api/models/{REPOSITORY}/tree/[^/]+.*", path):
            self._send_json([self._describe(name) for name in self.hub.list_files()])
        else:
            self._send(404, {"X-Error-Code": "RepoNotFound"}, b"")

    def _describe(self, name: str) -> dict[str, Any]:
        content = (self.hub.folder / name).read_bytes()
        return {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}

    def _send_json(self, value: Any) -> None:
        self._send(200, {"Content-Type": "application/json"}, json.dumps(value).encode())

    def _send_file(self, name: str, *, body: bool) -> None:
        path = self.hub.folder / name
        if not path.is_file():
            self._send(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}, b"")
            return
        content = path.read_bytes()
        headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if self.hub.status.get(name) == 403:
            self._send(403, headers | {"X-Error-Code": "GatedRepo"}, b"")
            return
        if not body:
            self._send(200, headers | {"Content-Length": str(len(content))}, b"")
            return
        if name in self.hub.status:
            self._send(self.hub.status[name], headers, b"")
            return
        requested = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        start = int(requested[1]) if requested else 0
        self.hub.downloads.append((name, start))
        if requested:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        headers["Content-Length"] = str(len(content) - start)
        end = start + self.hub.cut[name] if name in self.hub.cut else len(content)
        self._send(206 if requested else 200, headers, content[start:end])
        if self.hub.cut.pop(name, None) is not None:
            self.close_connection = True

    def _send(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def serving(folder: Path) -> Iterator[FakeHub]:
    """Serve a folder as a repository in this block."""
    hub = FakeHub(folder)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

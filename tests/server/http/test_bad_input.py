"""Invalid, oversized, slow and malicious requests get an error response and leave nothing behind."""

import base64
import io
import json
import socket
import struct
import time
import zlib
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
from PIL import Image

from tests.server.conftest import ALICE
from tests.server.live import Live

GENERATE, EDIT = "/v1/images/generations", "/v1/images/edits"


def error_of(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


def make_png(width: int, height: int) -> bytes:
    """Return a decompression bomb: a few kilobytes that decode to gigabytes."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    compressed = zlib.compress(bytes(10**6))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", compressed) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"{", "invalid_json"),
        (b"", "missing_required_parameter"),
        (b"\xff\xfe", "invalid_json"),
        (b"[]", "invalid_value"),
        (b'"a cat"', "invalid_value"),
        (b"{}", "missing_required_parameter"),
        (b'{"prompt": 7}', "invalid_value"),
        (b'{"prompt": "a cat", "n": "2"}', "invalid_value"),
        (b'{"prompt": "a cat", "n": true}', "invalid_value"),
        (b'{"prompt": "a cat", "guidance_scale": NaN}', "invalid_value"),
        (b'{"prompt": "a cat", "seed": -1}', "invalid_value"),
        (b'{"prompt": "a cat", "seed": 99999999999999999999999}', "invalid_value"),
        (b'{"prompt": "\\ud800"}', "invalid_value"),
        (b'{"prompt": "a cat", "size": "128x128x128"}', "invalid_size"),
        (b'{"prompt": "a cat", "size": "100000x100000"}', "invalid_size"),
        (b"[" * 100_000, "invalid_request"),
    ],
)
def test_an_invalid_body_is_rejected(live: Live, body: bytes, code: str) -> None:
    with live.http() as http:
        response = http.post(GENERATE, content=body, headers={"content-type": "application/json"})
    assert error_of(response) == (400, code)


def test_an_oversized_body_is_rejected_before_it_is_read(live: Live) -> None:
    with live.http() as http:
        start = time.monotonic()
        response = http.post(GENERATE, content=json.dumps({"prompt": "x" * 50_000_000}))
        assert error_of(response) == (413, "request_too_large")

        def chunks() -> Any:
            for _ in range(40):
                yield bytes(2**20)

        assert error_of(http.post(GENERATE, content=chunks())) == (413, "request_too_large"), (
            "also without a Content-Length"
        )
        assert time.monotonic() - start < 60


def test_invalid_images_and_decompression_bombs_are_rejected(live: Live) -> None:
    stream = io.BytesIO()
    Image.new("RGB", (64, 64)).save(stream, "PNG")
    valid = stream.getvalue()
    service = psutil.Process(live.process.pid)
    before = service.memory_info().rss
    with live.http() as http:
        for content, code in (
            (make_png(50_000, 50_000), "image_too_large"),
            (make_png(30_000, 1_000), "image_too_large"),
            (valid[:-40], "invalid_image"),
            (b"GIF89a" + bytes(100), "invalid_image"),
            (b"", "invalid_image"),
            (b"<svg/>", "invalid_image"),
        ):
            response = http.post(EDIT, files={"image": ("a.png", content)}, data={"prompt": "a tree"})
            assert error_of(response) == (400, code)
        invalid: list[tuple[dict[str, Any], dict[str, str], str]] = [
            ({}, {"prompt": "a tree", "image": "text"}, "unsupported_media_type"),
            ({"image": ("a.png", valid)}, {}, "missing_required_parameter"),
            ({"other": ("a.png", valid)}, {"prompt": "a tree"}, "unknown_parameter"),
            ({"image": ("a.png", valid)}, {"prompt": "a tree", "strength": "2"}, "invalid_value"),
            ({"image": ("a.png", valid)}, {"prompt": "a tree", "strength": "5e-324"}, "invalid_value"),
            ({"image": ("a.png", valid)}, {"prompt": "a tree", "n": "many"}, "invalid_value"),
        ]
        for files, data, code in invalid:
            response = http.post(EDIT, files=files or None, data=data)
            assert response.json()["error"]["code"] == code
            assert 400 <= response.status_code < 500
    assert service.memory_info().rss - before < 200 * 2**20


def make_chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def make_bombs() -> dict[str, bytes]:
    """Return small files that claim huge sizes or decompress to hundreds of megabytes."""
    stream = io.BytesIO()
    Image.new("RGB", (64, 64)).save(stream, "PNG")
    png = stream.getvalue()
    zeros = zlib.compress(bytes(300 * 2**20), 9)
    after_header = 8 + 25
    profile, text = make_chunk(b"iCCP", b"x\0\0" + zeros), make_chunk(b"zTXt", b"x\0\0" + zeros)
    vp8x = b"VP8X" + struct.pack("<I", 10) + bytes(4) + (16382).to_bytes(3, "little") * 2
    stream = io.BytesIO()
    Image.new("RGB", (16, 16)).save(stream, "JPEG")
    jpeg = stream.getvalue()
    frame = jpeg.index(b"\xff\xc0") + 5
    stream = io.BytesIO()
    frames = [Image.new("RGB", (3000, 3000), color) for color in ("red", "green", "blue")]
    frames[0].save(stream, "WEBP", save_all=True, append_images=frames[1:] * 20)
    return {
        "profile.png": png[:after_header] + profile + png[after_header:],
        "text.png": png[:after_header] + text + png[after_header:],
        "header.webp": b"RIFF" + struct.pack("<I", 22) + b"WEBP" + vp8x,
        "animation.webp": stream.getvalue(),
        "header.jpg": jpeg[:frame] + struct.pack(">HH", 65_500, 65_500) + jpeg[frame + 4 :],
        "header.gif": b"GIF89a" + struct.pack("<HH", 65_535, 65_535) + b"\xf0\0\0" + bytes(6),
        "video.mp4": b"\0\0\0\x18ftypmp42\0\0\0\0mp42isom" + bytes(100),
        "archive.zip": b"PK\x03\x04" + zeros,
    }


@pytest.fixture(scope="module")
def bombs() -> dict[str, bytes]:
    return make_bombs()


@pytest.mark.parametrize(
    "name",
    [
        "profile.png",
        "text.png",
        "header.webp",
        "animation.webp",
        "header.jpg",
        "header.gif",
        "video.mp4",
        "archive.zip",
    ],
)
def test_a_file_that_decompresses_to_gigabytes_is_rejected(live: Live, bombs: dict[str, bytes], name: str) -> None:
    """As a file, as a data URL of a job, and as one of a video."""
    content = bombs[name]
    url = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    processes = [psutil.Process(live.process.pid), psutil.Process(live.find_worker())]
    before = [process.memory_info().rss for process in processes]
    with live.http() as http:
        responses = [
            http.post(EDIT, files={"image": (name, content)}, data={"prompt": "a tree"}),
            http.post(EDIT, files={"image": (name, content), "mask": (name, content)}, data={"prompt": "a tree"}),
            http.post("/v1/jobs", json={"prompt": "a tree", "inputs": {"image": url}}),
            http.post("/v1/videos", json={"prompt": "a tree", "input_reference": {"image_url": url}}),
            http.post("/v1/videos", data={"prompt": "a tree"}, files={"input_reference": (name, content)}),
        ]
    for response in responses:
        assert response.status_code == 400, response.text
        assert response.json()["error"]["code"] in ("invalid_image", "image_too_large")
    for process, rss in zip(processes, before, strict=True):
        assert process.memory_info().rss - rss < 100 * 2**20


def test_the_number_of_files_and_fields_is_limited(live: Live) -> None:
    stream = io.BytesIO()
    Image.new("RGB", (64, 64)).save(stream, "PNG")
    png = stream.getvalue()
    with live.http() as http:
        for count in (17, 40, 2000):
            files = [("image[]", ("a.png", png))] * count
            response = http.post(EDIT, files=files, data={"prompt": "a tree"})
            assert response.status_code == 400
        fields = {f"field{number}": "x" for number in range(2000)}
        assert http.post(EDIT, files={"image": ("a.png", png)}, data=fields).status_code == 400
        urls = [f"data:image/png;base64,{base64.b64encode(png).decode()}"] * 100
        response = http.post("/v1/jobs", json={"prompt": "a tree", "inputs": {"image": urls}})
        assert error_of(response) == (400, "too_many_images")
        many = {f"input{number}": urls[0] for number in range(1000)}
        response = http.post("/v1/jobs", json={"prompt": "a tree", "inputs": many})
        assert error_of(response) == (400, "unknown_parameter")


@pytest.mark.parametrize(
    "path",
    [
        "/v1/jobs/..%2f..%2fjobs.sqlite",
        "/v1/jobs/%2e%2e/images/0",
        "/v1/jobs/job_00000000000000000000000000000000",
        "/v1/jobs/job_00000000000000000000000000000000/images/0",
        "/v1/jobs/job_00000000000000000000000000000000/images/0?token=00000000000000000000000000000000",
        "/v1/jobs/job_00000000000000000000000000000000/events",
        "/v1/models/..%2f..%2fetc%2fpasswd",
        "/page_files/index.html",
        "/..%2f..%2fpyproject.toml",
    ],
)
def test_an_unknown_path_is_not_found(live: Live, path: str) -> None:
    with live.http() as http:
        response = http.get(path)
        assert response.status_code == 404
        assert "error" in response.json()
    assert http.is_closed


def test_foreign_origins_hosts_and_invalid_keys_are_rejected(live: Live) -> None:
    with live.http() as http:
        foreign = http.post(GENERATE, json={"prompt": "x"}, headers={"Origin": "https://elsewhere.example"})
        assert error_of(foreign) == (403, "wrong_origin")
        for origin in ("null", "http://[", live.address + ".example"):
            response = http.post(GENERATE, json={"prompt": "x"}, headers={"Origin": origin})
            assert error_of(response) == (403, "wrong_origin")
        assert http.get("/v1/models", headers={"Origin": live.address}).status_code == 200
        rebound = http.get("/v1/models", headers={"Host": "elsewhere.example"})
        assert error_of(rebound) == (403, "wrong_host")
        assert error_of(http.get("/v1/images/generations")) == (405, "method_not_allowed")
        for value in ("", "Bearer", "Bearer wrong", f"Basic {ALICE}"):
            response = httpx.get(
                f"{live.address}/v1/models", headers={"Authorization": value} if value else {}, timeout=60
            )
            assert error_of(response) == (401, "invalid_api_key")
        assert httpx.get(f"{live.address}/metrics", timeout=60).status_code == 401
        job = f"{live.address}/v1/jobs/job_{'0' * 32}"
        for method, path in (
            ("GET", f"{job}?token=x"),
            ("DELETE", f"{job}/images/0?token=x"),
            ("POST", f"{job}/cancel"),
        ):
            assert httpx.request(method, path, timeout=60).status_code == 401, "a token is valid for one image only"
        assert httpx.request("POST", f"{live.address}/healthz", content=bytes(1000), timeout=60).status_code == 401


@pytest.mark.long
def test_an_incomplete_request_times_out(live: Live) -> None:
    address = urlsplit(live.address)
    endpoint = (str(address.hostname), int(address.port or 0))
    head = f"POST {GENERATE} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {ALICE}\r\n"
    requests = {
        "no data": "",
        "incomplete headers": head,
        "incomplete body": f"{head}Content-Type: application/json\r\nContent-Length: 100\r\n\r\n" + '{"prompt": ',
    }
    connections = {}
    for name, text in requests.items():
        connections[name] = socket.create_connection(endpoint, timeout=60)
        connections[name].sendall(text.encode())
    with live.http() as http:
        assert http.get("/healthz").status_code == 200, "other requests are served meanwhile"
    for name, connection in connections.items():
        response = connection.recv(10_000)
        assert response.startswith(b"HTTP/1.1 408"), name
        while connection.recv(10_000):
            continue
        connection.close()


def test_a_client_that_disconnects_while_sending_leaves_nothing(live: Live) -> None:
    address = urlsplit(live.address)
    with live.http() as http:
        before = len(http.get("/v1/jobs").json()["data"])
        for _ in range(20):
            with socket.create_connection((str(address.hostname), int(address.port or 0)), timeout=60) as connection:
                head = f"POST {GENERATE} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {ALICE}\r\n"
                connection.sendall(f"{head}Content-Length: 1000\r\n\r\n{{".encode())
        time.sleep(0.5)
        assert len(http.get("/v1/jobs").json()["data"]) == before
        assert psutil.Process(live.process.pid).num_fds() < 200

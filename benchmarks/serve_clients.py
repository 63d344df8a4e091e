"""Clients of a service that perform random actions, for `benchmarks.serve_load`."""

import base64
import io
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
from PIL import Image

__all__ = ["ImageClient", "MediaClient"]

PROMPTS = ("a red apple", "a cat", "a rocket on a light blue background", "a green tree", "a fox and a dog", "a bird")
ENDED = ("done", "failed", "cancelled")
_JOB_S = 180


def make_png(side: int, color: str) -> bytes:
    """Return a square image of one color."""
    stream = io.BytesIO()
    Image.new("RGB", (side, side), color).save(stream, "PNG")
    return stream.getvalue()


class ImageClient(threading.Thread):
    """Client that generates and edits images, with a random action at a time."""

    def __init__(
        self, address: str, number: int, stopping: threading.Event, counts: Counter[str], pause_s: float = 0.5
    ) -> None:
        super().__init__(daemon=True)
        self.rng, self.stopping, self.counts, self.pause_s = random.Random(number), stopping, counts, pause_s
        self.warmed_up = threading.Event()
        self.http = httpx.Client(base_url=address, timeout=_JOB_S)
        self.image, self.mask = make_png(128, "orange"), make_png(128, "white")

    def list_actions(self) -> list[Callable[[], str]]:
        """Return the actions; one that is listed twice is twice as frequent."""
        return [
            self.generate, self.generate, self.generate, self.preview, self.edit, self.edit_as_job, self.cancel,
            self.disconnect, self.send_invalid, self.delete,
        ]  # fmt: skip

    def run(self) -> None:
        """Perform actions until `stopping` is set."""
        actions = self.list_actions()
        first = actions.copy()  # each action once, to fill caches before the first reading
        with self.http:
            while not self.stopping.is_set():
                self.perform(first.pop() if first else self.rng.choice(actions))
                if not first:
                    self.warmed_up.set()
                self.stopping.wait(0 if first else self.rng.random() * 2 * self.pause_s)

    def perform(self, action: Callable[[], str]) -> None:
        """Perform an action and count its outcome."""
        try:
            self.counts[f"{action.__name__}: {action()}"] += 1
        except httpx.HTTPError as error:
            self.counts[f"{action.__name__}: {type(error).__name__}"] += 1

    def make_request(self, **arguments: Any) -> dict[str, Any]:
        """Return a random request."""
        steps = self.rng.choice((2, 4, 8))
        return {"prompt": self.rng.choice(PROMPTS), "num_inference_steps": steps, **arguments}

    def generate(self) -> str:
        """Generate one or two images in a random format."""
        output_format = self.rng.choice(("png", "jpeg", "webp"))
        request = self.make_request(n=self.rng.choice((1, 1, 2)), output_format=output_format)
        return str(self.http.post("/v1/images/generations", json=request).status_code)

    def preview(self) -> str:
        """Generate an image with previews."""
        request = self.make_request(stream=True, partial_images=2)
        with self.http.stream("POST", "/v1/images/generations", json=request) as response:
            events = [line for line in response.iter_lines() if line.startswith("event: ")]
        return events[-1].removeprefix("event: image_generation.") if events else "nothing"

    def edit(self) -> str:
        """Edit an image."""
        data = {"prompt": self.rng.choice(PROMPTS), "num_inference_steps": "4", "strength": "0.6"}
        response = self.http.post("/v1/images/edits", data=data, files={"image": ("a.png", self.image)})
        return str(response.status_code)

    def edit_as_job(self) -> str:
        """Submit an edit as a job, wait for it and fetch the image."""
        url = f"data:image/png;base64,{base64.b64encode(self.image).decode()}"
        job = self._wait(self.http.post("/v1/jobs", json=self.make_request(inputs={"image": url})))
        return str(self.http.get(job["images"][0]["url"]).status_code) if job["state"] == "done" else job["state"]

    def _wait(self, response: httpx.Response) -> dict[str, Any]:
        """Return a submitted job after it has ended."""
        job: dict[str, Any] = response.raise_for_status().json()
        end = time.monotonic() + _JOB_S
        while job["state"] not in ENDED and time.monotonic() < end:
            time.sleep(0.1)
            job = self.http.get(f"/v1/jobs/{job['id']}").raise_for_status().json()
        return job

    def cancel(self) -> str:
        """Cancel a job while it runs."""
        job = self.http.post("/v1/jobs", json=self.make_request(num_inference_steps=50)).json().get("id")
        time.sleep(self.rng.random())
        return str(self.http.post(f"/v1/jobs/{job}/cancel").status_code)

    def disconnect(self) -> str:
        """Disconnect before the image is finished."""
        try:
            self.http.post("/v1/images/generations", json=self.make_request(num_inference_steps=50), timeout=0.5)
        except httpx.TimeoutException:
            return "disconnected"
        return "answered"

    def send_invalid(self) -> str:
        """Send an invalid request."""
        invalid = self.rng.choice(({"prompt": "x", "n": 99}, {"prompt": ""}, {"prompt": "x", "size": "9x9"}))
        return str(self.http.post("/v1/images/generations", json=invalid).status_code)

    def delete(self) -> str:
        """List the jobs and delete finished ones."""
        jobs = self.http.get("/v1/jobs?limit=200").json()["data"]
        ended = [job["id"] for job in jobs if job["state"] in ENDED]
        for job in ended[20:]:
            self.http.delete(f"/v1/jobs/{job}")
        return str(self.http.get("/metrics").status_code)


class MediaClient(ImageClient):
    """Client that also edits with masks, and generates, downloads and cancels videos.

    It requires the models `sd`, `wan` and `ltx`.
    """

    def list_actions(self) -> list[Callable[[], str]]:
        """Return the actions of the other client and those with videos."""
        return [
            *super().list_actions(), self.inpaint, self.make_video, self.make_video, self.make_video_with_audio,
            self.cancel_video, self.remix, self.download_slowly,
        ]  # fmt: skip

    def inpaint(self) -> str:
        """Edit the masked area of an image."""
        data = {"prompt": self.rng.choice(PROMPTS), "model": "sd", "num_inference_steps": "4"}
        files = {"image": ("a.png", self.image), "mask": ("b.png", self.mask)}
        return str(self.http.post("/v1/images/edits", data=data, files=files).status_code)

    def make_video(self) -> str:
        """Generate a video in a random format, and download it, its thumbnail and a part of it."""
        video = self._submit_video(output_format=self.rng.choice(("mp4", "webm", "webp", "gif")))
        state = str(self._wait(self.http.get(f"/v1/jobs/{video}"))["state"])
        if state != "done":
            return state
        path = f"/v1/videos/{video}/content"
        for variant in ("video", "thumbnail", "spritesheet"):
            self.http.get(path, params={"variant": variant}).raise_for_status()
        return str(self.http.get(path, headers={"Range": "bytes=10-99"}).status_code)

    def make_video_with_audio(self) -> str:
        """Generate a video with audio from an image, sent as a form."""
        data = {
            "prompt": self.rng.choice(PROMPTS), "model": "ltx", "size": "32x32", "num_frames": "9",
            "num_inference_steps": "2", "spatio_temporal_guidance_blocks": "[1]",
        }  # fmt: skip
        response = self.http.post("/v1/videos", data=data, files={"input_reference": ("a.png", self.image)})
        video = response.raise_for_status().json()["id"]
        state = str(self._wait(self.http.get(f"/v1/jobs/{video}"))["state"])
        return str(self.http.get(f"/v1/videos/{video}/content").status_code) if state == "done" else state

    def cancel_video(self) -> str:
        """Cancel a video while it is queued, generated or encoded."""
        video = self._submit_video(num_frames=61)
        time.sleep(self.rng.random() * 2)
        self.http.post(f"/v1/jobs/{video}/cancel").raise_for_status()
        state = str(self._wait(self.http.get(f"/v1/jobs/{video}"))["state"])
        return "ended" if state in ("cancelled", "done") else state

    def remix(self) -> str:
        """Remix the newest finished video."""
        videos = self.http.get("/v1/videos?limit=20").json()["data"]
        finished = [video["id"] for video in videos if video["status"] == "completed"]
        if not finished:
            return "nothing to remix"
        response = self.http.post(f"/v1/videos/{finished[0]}/remix", json={"prompt": self.rng.choice(PROMPTS)})
        # Another client may have deleted the video since it was listed.
        return "ended" if response.status_code in (200, 404) else str(response.status_code)

    def download_slowly(self) -> str:
        """Disconnect while a video is downloaded."""
        videos = self.http.get("/v1/videos?limit=20").json()["data"]
        finished = [video["id"] for video in videos if video["status"] == "completed"]
        if not finished:
            return "nothing to download"
        with self.http.stream("GET", f"/v1/videos/{finished[-1]}/content") as response:
            for _ in response.iter_bytes(200):
                time.sleep(0.2)
                break
        return "ended" if response.status_code in (200, 404) else str(response.status_code)

    def _submit_video(self, **arguments: Any) -> str:
        body = self.make_request(model="wan", size="32x32", **{"num_frames": 9, "num_inference_steps": 2, **arguments})
        return str(self.http.post("/v1/videos", json=body).raise_for_status().json()["id"])

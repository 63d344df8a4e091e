"""The service on Ray Serve: replicas that die, unlike devices behind one address, and calls that cannot be served."""

import base64
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy
import psutil
import pytest
from PIL import Image

import anyaccel
from anyaccel.cluster.device_slots import claim_device
from anyaccel.cluster.serve.applications import read_replicas
from anyaccel.cluster.serve.merged_facts import add_heartbeats, merge_facts
from anyaccel.cluster.serve.replica_load import ReplicaLoad, find_shape
from anyaccel.errors import DeviceUnavailableError, UsageError
from anyaccel.generation.image_format import read_metadata
from anyaccel.recipes import recipes
from anyaccel.server.worker.messages import Heartbeat, ModelFacts
from tests.cluster.serve.replica_kills import (
    CLOSE,
    PROMPT,
    STEPS,
    kill_under_load,
    list_replicas,
    make_alone,
    read_picture,
)
from tests.server.live import Live

ENDLESS = 20_000
"""Steps of a picture that nobody waits for."""
SMALL, LARGE = find_shape({"model": "m", "width": 64}), find_shape({"model": "m", "width": 128})


@pytest.fixture
def ray_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A place of this test's own, with a short name: Ray's sockets lie there, and clusters of others are not found."""
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as place:
        monkeypatch.setenv("RAY_TMPDIR", place)
        yield


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny pipeline of Stable Diffusion's kind, saved."""
    place = tmp_path_factory.mktemp("models") / "tiny"
    pipe: Any = recipes()["stable-diffusion"].make()
    pipe.save_pretrained(place)
    return str(place)


@pytest.mark.long
@pytest.mark.usefixtures("ray_folder")
def test_replicas_that_are_killed_under_load_cost_no_job_and_no_picture(tmp_path: Path, tiny: str) -> None:
    live = Live(
        tmp_path, f"tiny={tiny}", "--ray", "local", "--device", "cpu", "--replicas", "2", "--dtype", "float32",
        "--max-batch", "2", "--limit", f"max_steps={ENDLESS}",
    )  # fmt: skip
    try:
        told = kill_under_load(live, make_alone(tiny), seconds=8, every_s=4, clients=2, most=1, least=5)
        assert (told.kills, told.wrong) == (1, [])
        assert told.right >= 5
        assert set(told.states) == {"done"}
        assert told.attempts == 1, "the service itself began with each job once"
        _check_the_rest_of_the_service(live)
    finally:
        assert live.end() == 0
    end = time.monotonic() + 120
    while left := list_processes(live):  # Ray's own reaper goes last
        assert time.monotonic() < end, left
        time.sleep(0.1)


def _check_the_rest_of_the_service(live: Live) -> None:
    """Previews, edits and cancelling, of which replicas know and the address tells."""
    client = live.openai()
    events = list(
        client.images.generate(
            prompt=PROMPT, stream=True, partial_images=2, extra_body={"seed": 7, "num_inference_steps": 90}
        )
    )
    assert [event.type.rpartition(".")[2] for event in events] == ["partial_image", "partial_image", "completed"]
    grey = io.BytesIO()
    Image.new("RGB", (128, 128), "grey").save(grey, "PNG")
    edited = client.images.edit(
        image=("grey.png", grey.getvalue()), prompt=PROMPT, extra_body={"seed": 7, "num_inference_steps": STEPS}
    )
    assert edited.data is not None
    assert len(edited.data) == 1
    with live.http() as http:
        job = http.post("/v1/jobs", json={"prompt": PROMPT, "num_inference_steps": ENDLESS, "n": 2}).json()["id"]
        wait_for(lambda: http.get(f"/v1/jobs/{job}").json()["progress"] > 0, 180)
        deaths = count_deaths(http)
        for replica in list_replicas(live):  # in the middle of a picture, whichever makes it
            os.kill(replica, signal.SIGKILL)
        wait_for(lambda: count_deaths(http) > deaths, 180)
        assert http.get(f"/v1/jobs/{job}").json()["state"] == "running", "it is made by the next one"
        http.post(f"/v1/jobs/{job}/cancel")
        live.wait_state(http, job, "cancelled")


def count_deaths(http: httpx.Client) -> float:
    """How often the service saw a replica die."""
    told = http.get("/metrics").text.splitlines()
    return sum(
        float(line.split()[-1]) for line in told if line.startswith('anyaccel_worker_ends_total{reason="death"}')
    )


def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    """Until something is so."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not so in {seconds} s"
        time.sleep(0.05)


def list_processes(live: Live) -> list[str]:
    """What is left of the session of a service that ended; of a process that ended too, nothing is left to do."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == live.process.pid and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline())[:200])
        except (OSError, psutil.Error):
            continue
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("ray_folder")
def test_unlike_devices_stand_in_one_pool_and_give_one_picture(tmp_path: Path, tiny: str) -> None:
    """Slow: three virtual devices start beside each other, each with its own torch."""
    kinds = {"mps", "hpu", "neuron"}
    live = Live(
        tmp_path / "data", f"tiny={tiny}", "--ray", "local", "--dtype", "float32", "--sizes", "64x64",
        "--max-batch", "2", *(f"--device=virtual:{kind}" for kind in sorted(kinds)),
    )  # fmt: skip
    try:
        client = live.openai()

        def ask(_: int) -> str:
            options = {"seed": 7, "num_inference_steps": STEPS}
            made = client.images.generate(prompt=PROMPT, size="64x64", extra_body=options).data
            assert made is not None
            return str(made[0].b64_json)

        with ThreadPoolExecutor(6) as threads:
            answers = list(threads.map(ask, range(12)))
        with live.http() as http:
            model = http.get("/v1/status").json()["models"][0]
    finally:
        assert live.end() == 0
    alone = anyaccel.generate(
        PROMPT, model=tiny, device="cpu", dtype="float32", seed=7, width=64, height=64, num_inference_steps=STEPS
    )
    expected = numpy.asarray(alone.images[0]).astype(int)
    assert {find_device_of(answer, tmp_path) for answer in answers} == kinds, "each of them answered"
    for answer in answers:
        assert abs(read_picture(answer) - expected).max() <= CLOSE
    assert all(f"on {kind}:0" in model["plan"] for kind in kinds)


def find_device_of(answer: str, folder: Path) -> str:
    """Where a picture was made, as it tells itself."""
    (folder / "one.png").write_bytes(base64.b64decode(answer))
    (origin,) = read_metadata(folder / "one.png")
    return str(origin.device).partition(":")[0]


@pytest.mark.slow
def test_in_a_real_cluster_shapes_part_and_replicas_stand_on_devices_that_are_there() -> None:
    command = [sys.executable, "-m", "tests.cluster.batch.parting"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=400, check=True)
    said = json.loads(ran.stdout.splitlines()[-1])
    assert sorted(said["shapes"]) == [[64], [128]]
    kinds = said["kinds"]
    assert kinds["auto None"] == [["cpu", 1, False, 4]]
    assert kinds["cpu 2"] == [["cpu", 2, False, 4]]
    assert kinds["cpu auto"] == [["cpu", 2, True, 4]], "from one to all"
    assert kinds["virtual:mps virtual:hpu,count=8 4"] == [
        ["virtual:mps", 4, False, 1],
        ["virtual:hpu,count=8", 4, False, 4],
    ]
    for asked, words in {
        "cpu 3": "3 workers on cpu were asked for, and the cluster has room for 2",
        "virtual:hpu 9": "room for 8",
        "npu None": "Ray counts them as NPU",
        "mlu 1": "Ray counts them as mlu",
        "hpu:3 None": "Ray picks",
        "cpu cpu None": "named twice",
    }.items():
        assert words in kinds[asked]


class Router:
    """What the board asks of Serve's router."""

    def __init__(self, *replicas: str) -> None:
        self.curr_replicas = {Named(name): None for name in replicas}


class Named:
    def __init__(self, name: str) -> None:
        self.unique_id = name


def test_the_board_prefers_idle_devices_then_those_with_the_same_shape() -> None:
    board = ReplicaLoad()
    assert board.choose({"app": 2}, SMALL) is None, "no replica is there"
    board.add_router("app", Router("a", "b"))
    board.add_router("other", Router("c"))
    board.put("1", "app", "a", SMALL)
    assert board.choose({"app": 2, "other": 2}, SMALL) == "app", "an idle one of the first"
    board.put("2", "app", "b", LARGE)
    board.put("3", "other", "c", LARGE)
    assert board.weigh("a", SMALL, 4) < board.weigh("b", SMALL, 4), "among its own, though both are as busy"
    assert board.choose({"app": 4, "other": 4}, SMALL) == "app"
    board.put("4", "app", "a", SMALL)
    assert board.weigh("a", SMALL, 2) > board.weigh("b", SMALL, 2), "what is full comes last"
    assert board.lose("a")
    assert not board.lose("a"), "that is no news"
    assert board.list_replicas("app") == ["b"]
    assert (board.take_off("2"), board.find("2"), board.take_off("2")) == ("b", None, None)


def make_facts(**changes: Any) -> ModelFacts:
    facts = ModelFacts(
        name="m", pipeline="P", device="a:0", virtual=True, dtype="float32", tasks=("generate", "edit"),
        takes={"generate": ("prompt", "width"), "edit": ("image",)}, multiple=8, sizes=((64, 64), (128, 128)),
        fixed_sizes=False, steps=8, guidance=2.0, joins={"unet": True}, at_once=2, plan="plan of a",
    )  # fmt: skip
    return replace(facts, **changes)


def test_a_pool_takes_what_all_of_its_devices_take() -> None:
    other = make_facts(
        device="b:0", tasks=("generate",), takes={"generate": ("prompt",)}, multiple=12, sizes=((64, 64),),
        fixed_sizes=True, joins={"unet": False}, plan="plan of b",
    )  # fmt: skip
    (joined,) = merge_facts([[make_facts()], [other]], 5)
    assert (joined.tasks, joined.takes) == (("generate",), {"generate": ("prompt",)})
    assert (joined.multiple, joined.sizes, joined.fixed_sizes, joined.at_once) == (24, ((64, 64),), True, 5)
    assert (joined.device, joined.joins) == ("a:0, b:0", {"unet": True})
    assert "plan of a" in joined.plan
    assert "plan of b" in joined.plan
    beats = [Heartbeat(None, 5, {1: 2}, ("m",)), Heartbeat(7, 6, {2: 1}, ("m", "n"))]
    assert add_heartbeats(beats[1], beats) == Heartbeat(7, 11, {2: 1}, ("m", "n"))


def test_replicas_that_ray_gives_no_number_claim_a_device_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    device, held = claim_device("cpu")
    assert device == "cpu:0"
    with pytest.raises(DeviceUnavailableError, match="all 1 devices of cpu"):
        claim_device("cpu")
    held.close()
    claim_device("cpu")[1].close()


def run(*options: str) -> Any:
    command = [sys.executable, "-m", "anyaccel", "serve", "--port", "0", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.parametrize(
    ("options", "status", "words"),
    [
        (("--replicas", "2"), 2, "served on Ray"),
        (("--device", "cpu", "--device", "virtual:hpu"), 2, "served on Ray"),
        (("--ray", "here"), 2, "no address"),
        (("--ray", "ray://127.0.0.1:10001"), 2, "Ray's client"),
        (("--ray", "127.0.0.1:9"), 3, "no Ray cluster answers at 127.0.0.1:9"),
        (("--ray", "auto", "--replicas", "some"), 2, "no number of replicas"),
    ],
)
def test_what_cannot_be_is_said_at_once(options: tuple[str, ...], status: int, words: str, tmp_path: Path) -> None:
    ran = run(*options, "--data", str(tmp_path))
    assert (ran.returncode, "Traceback" in ran.stderr) == (status, False), ran.stderr
    assert words in ran.stderr
    assert "hint:" in ran.stderr
    assert list(tmp_path.iterdir()) == []


def test_replicas_are_a_number_or_auto() -> None:
    assert [read_replicas(text) for text in (None, "auto", "3")] == [None, "auto", 3]
    for text in ("0", "-1", "many", "1.5"):
        with pytest.raises(UsageError, match="no number"):
            read_replicas(text)

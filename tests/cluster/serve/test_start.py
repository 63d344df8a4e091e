"""Tests for the service on Ray Serve: dying replicas, different devices in one pool, and invalid options."""

import base64
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
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
    PROMPT,
    STEPS,
    TOLERANCE,
    decode_image,
    generate_references,
    kill_under_load,
    list_replicas,
)
from tests.conftest import RunCli
from tests.server.live import Live

ENDLESS = 20_000
"""Steps of an image that does not finish during the test."""
SMALL, LARGE = find_shape({"model": "m", "width": 64}), find_shape({"model": "m", "width": 128})


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of a tiny Stable Diffusion pipeline."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    pipe: Any = recipes()["stable-diffusion"].make()
    pipe.save_pretrained(folder)
    return str(folder)


@pytest.mark.long
@pytest.mark.usefixtures("ray_folder")
@pytest.mark.parametrize("kill_all", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_killing_a_replica_under_load_loses_no_job_and_no_image(kill_all: bool, tmp_path: Path, tiny: str) -> None:
    """Slow with a second kill, of all replicas: each replica that replaces one imports torch and diffusers."""
    live = Live(
        tmp_path, f"tiny={tiny}", "--ray", "local", "--device", "cpu", "--replicas", "2", "--dtype", "float32",
        "--max-batch", "2", "--limit", f"max_steps={ENDLESS}",
    )  # fmt: skip
    try:
        result = kill_under_load(
            live, generate_references(tiny), seconds=8, every_s=4, clients=2, max_kills=1, min_responses=5
        )
        assert (result.kills, result.wrong) == (1, [])
        assert result.correct >= 5
        assert set(result.states) == {"done"}
        assert result.attempts == 1, "the service itself started each job once"
        _check_previews_edits_and_cancellation(live, kill_all)
    finally:
        assert live.end() == 0
    end = time.monotonic() + 120
    while remaining := list_processes(live):  # Ray's own reaper ends last
        assert time.monotonic() < end, remaining
        time.sleep(0.1)


def _check_previews_edits_and_cancellation(live: Live, kill_all: bool) -> None:
    """Check features that depend on messages from the replicas."""
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
        assert deaths >= 1, "the replica that was killed under load"
        if kill_all:
            for replica in list_replicas(live):  # one of them is generating the image
                os.kill(replica, signal.SIGKILL)
            wait_for(lambda: count_deaths(http) > deaths, 180)
            assert http.get(f"/v1/jobs/{job}").json()["state"] == "running", "another replica runs it"
        http.post(f"/v1/jobs/{job}/cancel")
        live.wait_state(http, job, "cancelled")


def count_deaths(http: httpx.Client) -> float:
    """Return the number of replica deaths that the service has counted."""
    lines = http.get("/metrics").text.splitlines()
    return sum(
        float(line.split()[-1]) for line in lines if line.startswith('anyaccel_worker_ends_total{reason="death"}')
    )


def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    """Poll until a condition is true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"timed out after {seconds} s"
        time.sleep(0.05)


def list_processes(live: Live) -> list[str]:
    """Return the command lines of running processes in the session of a service."""
    commands = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == live.process.pid and process.status() != psutil.STATUS_ZOMBIE:
                commands.append(" ".join(process.cmdline())[:200])
        except (OSError, psutil.Error):
            continue
    return commands


@pytest.mark.slow
@pytest.mark.usefixtures("ray_folder")
def test_different_devices_in_one_pool_generate_the_same_image(tmp_path: Path, tiny: str) -> None:
    """Slow: three virtual devices start at the same time, and each one imports torch."""
    devices = {"mps", "hpu", "neuron"}
    live = Live(
        tmp_path / "data", f"tiny={tiny}", "--ray", "local", "--dtype", "float32", "--sizes", "64x64",
        "--max-batch", "2", *(f"--device=virtual:{device}" for device in sorted(devices)),
    )  # fmt: skip
    try:
        client = live.openai()

        def request(_: int) -> str:
            options = {"seed": 7, "num_inference_steps": STEPS}
            images = client.images.generate(prompt=PROMPT, size="64x64", extra_body=options).data
            assert images is not None
            return str(images[0].b64_json)

        with ThreadPoolExecutor(6) as threads:
            responses = list(threads.map(request, range(12)))
        with live.http() as http:
            model = http.get("/v1/status").json()["models"][0]
    finally:
        assert live.end() == 0
    reference = anyaccel.generate(
        PROMPT, model=tiny, device="cpu", dtype="float32", seed=7, width=64, height=64, num_inference_steps=STEPS
    )
    expected = numpy.asarray(reference.images[0]).astype(int)
    assert {read_device_name(response, tmp_path) for response in responses} == devices, (
        "every device generated an image"
    )
    for response in responses:
        assert abs(decode_image(response) - expected).max() <= TOLERANCE
    assert all(f"on {device}:0" in model["plan"] for device in devices)


def read_device_name(response: str, folder: Path) -> str:
    """Return the device name in the metadata of an image."""
    (folder / "image.png").write_bytes(base64.b64decode(response))
    (metadata,) = read_metadata(folder / "image.png")
    return str(metadata.device).partition(":")[0]


@pytest.mark.slow
def test_a_real_cluster_separates_shapes_and_checks_device_groups() -> None:
    command = [sys.executable, "-m", "tests.cluster.serve.shape_routing"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=True)
    result = json.loads(done.stdout.splitlines()[-1])
    assert sorted(result["shapes"]) == [[64], [128]]
    groups = result["groups"]
    assert groups["auto None"] == [["cpu", 1, False, 4]]
    assert groups["cpu 2"] == [["cpu", 2, False, 4]]
    assert groups["cpu auto"] == [["cpu", 2, True, 4]], "scales from one replica to all slots"
    assert groups["virtual:mps virtual:hpu,count=8 4"] == [
        ["virtual:mps", 4, False, 1],
        ["virtual:hpu,count=8", 4, False, 4],
    ]
    for options, message in {
        "cpu 3": "3 workers on cpu devices requested, but the cluster has resources for only 2",
        "virtual:hpu 9": "the cluster has resources for only 8",
        "npu None": "Ray resource 'NPU'",
        "mlu 1": "Ray resource 'mlu'",
        "hpu:3 None": "Ray assigns the device indices",
        "cpu cpu None": "--device cpu is given more than once",
    }.items():
        assert message in groups[options]


class FakeRouter:
    """The attribute of Serve's router that `ReplicaLoad` uses."""

    def __init__(self, *replicas: str) -> None:
        self.curr_replicas = {FakeReplicaId(name): None for name in replicas}


class FakeReplicaId:
    def __init__(self, name: str) -> None:
        self.unique_id = name


def test_replica_load_prefers_idle_replicas_then_those_with_the_same_shape() -> None:
    load = ReplicaLoad()
    assert load.choose_app({"app": 2}, SMALL) is None, "there is no replica"
    load.add_router("app", FakeRouter("a", "b"))
    load.add_router("other", FakeRouter("c"))
    load.assign("1", "app", "a", SMALL)
    assert load.choose_app({"app": 2, "other": 2}, SMALL) == "app", "an idle replica of the first application"
    load.assign("2", "app", "b", LARGE)
    load.assign("3", "other", "c", LARGE)
    assert load.score("a", SMALL, 4) < load.score("b", SMALL, 4), "same shape, same utilization"
    assert load.choose_app({"app": 4, "other": 4}, SMALL) == "app"
    load.assign("4", "app", "a", SMALL)
    assert load.score("a", SMALL, 2) > load.score("b", SMALL, 2), "a full replica comes last"
    assert load.mark_lost("a")
    assert not load.mark_lost("a"), "already marked"
    assert load.list_replicas("app") == ["b"]
    assert (load.release("2"), load.find_replica("2"), load.release("2")) == ("b", None, None)


def make_facts(**changes: Any) -> ModelFacts:
    facts = ModelFacts(
        name="m", pipeline="P", device="a:0", virtual=True, dtype="float32", tasks=("generate", "edit"),
        parameters={"generate": ("prompt", "width"), "edit": ("image",)}, multiple=8, sizes=((64, 64), (128, 128)),
        fixed_sizes=False, defaults={"generate": {"num_inference_steps": 8}}, batched={"unet": True},
        max_concurrent=2, plan="plan of a",
    )  # fmt: skip
    return replace(facts, **changes)


def test_a_pool_accepts_what_all_of_its_devices_accept() -> None:
    other = make_facts(
        device="b:0", tasks=("generate",), parameters={"generate": ("prompt",)}, multiple=12, sizes=((64, 64),),
        fixed_sizes=True, batched={"unet": False}, plan="plan of b",
    )  # fmt: skip
    (merged,) = merge_facts([[make_facts()], [other]], 5)
    assert (merged.tasks, merged.parameters) == (("generate",), {"generate": ("prompt",)})
    assert (merged.multiple, merged.sizes, merged.fixed_sizes, merged.max_concurrent) == (24, ((64, 64),), True, 5)
    assert (merged.device, merged.batched) == ("a:0, b:0", {"unet": True})
    assert "plan of a" in merged.plan
    assert "plan of b" in merged.plan
    heartbeats = [Heartbeat(None, 5, {1: 2}, ("m",)), Heartbeat(7, 6, {2: 1}, ("m", "n"))]
    assert add_heartbeats(heartbeats[1], heartbeats) == Heartbeat(7, 11, {2: 1}, ("m", "n"))


def test_replicas_without_an_index_from_ray_claim_a_device_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    device, lock = claim_device("cpu")
    assert device == "cpu:0"
    with pytest.raises(DeviceUnavailableError, match="no cpu device on this machine is free"):
        claim_device("cpu")
    lock.close()
    claim_device("cpu")[1].close()


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        (("--replicas", "2"), 2, "--replicas requires --ray"),
        (("--device", "cpu", "--device", "virtual:hpu"), 2, "more than one --device requires --ray"),
        (("--ray", "here"), 2, "not a valid Ray cluster address"),
        (("--ray", "ray://127.0.0.1:10001"), 2, "Ray Client"),
        (("--ray", "127.0.0.1:9"), 3, "cannot reach a Ray cluster at 127.0.0.1:9"),
        (("--ray", "auto", "--replicas", "some"), 2, "not a valid number of replicas"),
    ],
)
def test_invalid_options_are_rejected_at_the_start(
    options: tuple[str, ...], status: int, message: str, run_cli_forked: RunCli, tmp_path: Path
) -> None:
    done = run_cli_forked("serve", "--port", "0", *options, "--data", str(tmp_path))
    assert (done.returncode, "Traceback" in done.stderr) == (status, False), done.stderr
    assert message in done.stderr
    assert "hint:" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_replicas_are_an_integer_or_auto() -> None:
    assert [read_replicas(text) for text in (None, "auto", "3")] == [None, "auto", 3]
    for text in ("0", "-1", "many", "1.5"):
        with pytest.raises(UsageError, match="not a valid number of replicas"):
            read_replicas(text)

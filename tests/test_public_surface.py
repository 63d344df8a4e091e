"""The public API: the documentation lists it, and no submodule shadows a public name."""

import importlib
import json
import pkgutil
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import anyaccel
from tests.conftest import NEEDS_RECIPES, ROOT, SOURCE, RunCli, run_in_fork
from tools.public_surface import BLOCKS, PAGE, render_page

HINT = "run `python tools/public_surface.py`"

OPTIONAL_MODULES = {
    "anyaccel.cluster.serve.router": {"ray"},
    "anyaccel.cluster.serve.start": {"fastapi", "prometheus_client", "ray", "uvicorn"},
    "anyaccel.runtime.speed.group_norm_triton": {"triton"},
    "anyaccel.server.http.app": {"fastapi", "prometheus_client"},
    "anyaccel.server.http.audio_api": {"fastapi", "prometheus_client"},
    "anyaccel.server.http.audio_request": {"fastapi"},
    "anyaccel.server.http.docs_page": {"fastapi"},
    "anyaccel.server.http.errors": {"fastapi"},
    "anyaccel.server.http.generation_request": {"fastapi"},
    "anyaccel.server.http.image_request": {"fastapi"},
    "anyaccel.server.http.images_api": {"fastapi", "prometheus_client"},
    "anyaccel.server.http.input_files": {"fastapi"},
    "anyaccel.server.http.jobs_api": {"fastapi", "prometheus_client"},
    "anyaccel.server.http.loras_api": {"fastapi", "prometheus_client"},
    "anyaccel.server.http.middleware": {"fastapi", "prometheus_client"},
    "anyaccel.server.http.pipeline_arguments": {"fastapi"},
    "anyaccel.server.http.service": {"fastapi", "prometheus_client"},
    "anyaccel.server.http.slow_client_timeouts": {"uvicorn"},
    "anyaccel.server.http.status_api": {"fastapi", "prometheus_client"},
    "anyaccel.server.http.video_request": {"fastapi"},
    "anyaccel.server.http.videos_api": {"fastapi", "prometheus_client"},
    "anyaccel.server.http.web_page": {"fastapi"},
    "anyaccel.server.jobs.dispatcher": {"prometheus_client"},
    "anyaccel.server.jobs.metrics": {"prometheus_client"},
    "anyaccel.server.run_server": {"fastapi", "prometheus_client", "uvicorn"},
}
"""Submodules that import an optional package, or one that torch installs only on some platforms; others must import."""

SUBMODULES_MAY_SHADOW = (anyaccel.__name__, "anyaccel.backends", "anyaccel.recipes")


@pytest.mark.parametrize("block", BLOCKS)
def test_the_page_lists_what_the_code_has(block: str) -> None:
    text = PAGE.read_text(encoding="utf-8")
    written = re.search(rf"<!-- generated: {block} -->\n(.*?)<!-- end -->", text, re.DOTALL)
    assert written is not None, f"{PAGE.name} has no block {block}"
    assert written[1].strip() == BLOCKS[block]().strip(), HINT


def test_only_generated_blocks_of_the_page_change() -> None:
    fixed = re.compile(r"(<!-- generated: \w+ -->\n).*?(<!-- end -->)", re.DOTALL)
    text = PAGE.read_text(encoding="utf-8")
    assert fixed.sub(r"\1\2", render_page(text)) == fixed.sub(r"\1\2", text)


# JSON output


def list_keys(document: Any, path: str = "") -> set[str]:
    """Return the path of every key in a JSON document: `entries[].name`."""
    if isinstance(document, list):
        return {key for value in document for key in list_keys(value, f"{path}[]")}
    if not isinstance(document, dict):
        return set()
    paths = {name: f"{path}.{name}" if path else name for name in document}
    return set(paths.values()) | {key for name, value in document.items() for key in list_keys(value, paths[name])}


def read_documented_keys(command: str) -> list[str]:
    row = re.search(
        rf"^\| `{re.escape(command)}` \| (.*) \| tested \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE
    )
    assert row is not None, f"{PAGE.name} has no row for {command}"
    return re.findall(r"`([^`]+)`", row[1])


def matches(pattern: str, key: str) -> bool:
    expression = re.escape(pattern.removesuffix("?")).replace(r"\*", r"[^.\[]+")
    return re.fullmatch(expression, key) is not None


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("devices --json", ("devices", "--json")),
        ("cache list --json", ("cache", "list", "--json")),
        ("explain --json", ("explain", "embedded", "--device", "mps", "--json")),
        ("generate --json", ("generate", "a fox", "--steps", "1", "--device", "cpu", "--json")),
        ("generate --explain --json", ("generate", "a fox", "--device", "cpu", "--explain", "--json")),
    ],
)
def test_the_page_lists_the_keys_of_json_output(
    command: str, arguments: tuple[str, ...], run_cli_forked: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cache = ROOT / "tests" / "compatibility" / "v0_1" / "cache" / "folder"
    done = run_cli_forked(*arguments, **({"ANYACCEL_CACHE": str(cache)} if arguments[0] == "cache" else {}))
    assert done.returncode == 0, done.stderr
    keys, patterns = list_keys(json.loads(done.stdout)), read_documented_keys(command)
    undocumented = {key for key in keys if not any(matches(pattern, key) for pattern in patterns)}
    assert undocumented == set(), "not on the page"
    required = [pattern for pattern in patterns if not pattern.endswith("?")]
    missing = {pattern for pattern in required if not any(matches(pattern, key) for key in keys)}
    assert missing == set(), "not in the output"


# Names


@pytest.mark.parametrize("name", SUBMODULES_MAY_SHADOW)
def test_no_submodule_has_the_name_of_an_exported_object(name: str) -> None:
    module = importlib.import_module(name)
    submodules = {submodule.name for submodule in pkgutil.iter_modules(module.__path__)}
    assert submodules & set(module.__all__) == set()


def import_submodules() -> dict[str, str]:
    """Import every submodule; map each optional one that cannot be imported to its missing package."""
    missing = {}

    def fail(name: str) -> None:
        raise AssertionError(f"{name} cannot be imported")

    for submodule in pkgutil.walk_packages(anyaccel.__path__, "anyaccel.", onerror=fail):
        try:
            importlib.import_module(submodule.name)
        except ModuleNotFoundError as error:
            if submodule.name not in OPTIONAL_MODULES:
                raise
            missing[submodule.name] = (error.name or "").split(".")[0]
    return missing


def call_everything() -> dict[str, str]:
    """Call every public function with small arguments; return the type name of each result."""
    import torch

    from anyaccel.errors import NotMeasurableError
    from anyaccel.recipes import recipes

    weights = str(ROOT / "src" / "anyaccel" / "embedded" / "weights")
    called: dict[str, str] = {}

    def call(name: str, *args: Any, returns: type | None = None, **kwargs: Any) -> Any:
        value = getattr(anyaccel, name)(*args, **kwargs)
        assert returns is None or isinstance(value, returns), (name, value)
        called[name] = type(value).__name__
        return value

    def measure(name: str, kind: type | None) -> None:
        """Call a function that may raise `NotMeasurableError`."""
        try:
            call(name, "cpu", returns=kind)
        except NotMeasurableError as error:
            called[name] = f"{type(error).__name__}, {error.hint}"

    assert all(isinstance(device, anyaccel.Device) for device in call("devices", returns=list))
    assert call("is_available", "cpu") is True
    assert call("open_device", "cpu").torch_device.type == "cpu"
    assert call("sheet", "mps", returns=anyaccel.Sheet).name == "mps"
    assert call("adjust_dtype", "float64", "mps") is torch.float32
    assert call("supports_training", "cpu") is True
    assert call("device_count", "cpu") == 1
    call("manual_seed", "cpu", 7)
    assert call("randn", (2, 3), device="cpu").shape == (2, 3)
    call("synchronize", "cpu")
    call("empty_cache", "cpu")
    measure("memory", anyaccel.Memory)
    measure("max_memory", int)
    measure("reset_peak_memory", None)
    call("explain", "embedded", "mps", returns=anyaccel.Plan)
    result = call("generate", "a fox", device="cpu", seed=7, dtype="float32", num_inference_steps=1)
    assert isinstance(result, anyaccel.Result)
    assert len(result.images) == 1
    pipe = call("place", recipes()["stable-diffusion"].make(), "cpu", dtype="float32")
    assert isinstance(pipe.plan, anyaccel.Plan)
    pipe = anyaccel.DiffusionPipeline.from_pretrained(weights)
    for name in ("AutoPipelineForText2Image", "AutoPipelineForImage2Image", "AutoPipelineForInpainting"):
        called[name] = type(getattr(anyaccel, name).from_pipe(pipe)).__name__
    assert call("check", "stable-diffusion", "mps", num_inference_steps=1, returns=anyaccel.Report).devices.keys() == {
        "mps"
    }
    with call("virtual", "mps"):
        assert anyaccel.is_available("mps")
        assert anyaccel.randn((2,), device="mps").device.type == "mps"
    return called


def use_everything() -> None:
    """Import every submodule, then use every public name. This runs in a child process."""
    missing = import_submodules()
    shadowed = [name for name in anyaccel.__all__ if isinstance(getattr(anyaccel, name), ModuleType)]
    assert shadowed == [], f"submodules shadow {shadowed}"
    functions = [name for name in anyaccel.__all__ if is_function(getattr(anyaccel, name))]
    called = call_everything()
    shadowed = [name for name in anyaccel.__all__ if isinstance(getattr(anyaccel, name), ModuleType)]
    assert shadowed == [], f"submodules shadow {shadowed} after use"
    print(json.dumps({"missing": missing, "called": called, "functions": functions}))


def is_function(value: object) -> bool:
    return isinstance(value, Callable) and not isinstance(value, type)  # type: ignore[arg-type]


def test_the_optional_modules_exist() -> None:
    assert [name for name in OPTIONAL_MODULES if not (SOURCE.parent / f"{name.replace('.', '/')}.py").is_file()] == []


@NEEDS_RECIPES
@pytest.mark.long
def test_every_public_function_works_after_all_submodules_were_imported(tmp_path: Path) -> None:
    done = run_in_fork(use_everything, ["python"], {"HF_HUB_OFFLINE": "1", "ANYACCEL_CACHE": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    for name, package in report["missing"].items():
        assert package in OPTIONAL_MODULES[name], f"{name} needs {package}"
    assert set(report["functions"]) - set(report["called"]) == set(), "not called by call_everything"

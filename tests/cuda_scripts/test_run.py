"""`anyaccel run`: unmodified CUDA scripts on virtual devices.

Every twelfth program runs on one of the devices here. `python -m tests.cuda_scripts` and the slow test run all programs
on all devices.
"""

import importlib.abc
import importlib.machinery
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from anyaccel.cli.run import split_device
from anyaccel.cuda_scripts.library_patches import _PatchOnImport
from anyaccel.errors import UsageError
from anyaccel.recipes import recipes
from tests.conftest import NEEDS_RECIPES, RunCli
from tests.cuda_scripts.matrix import (
    DEVICES,
    PROGRAMS,
    UNSUPPORTED,
    WITHOUT_REFERENCE,
    ProgramOutcome,
    compare,
    find_program,
    preload,
    run_on,
    run_reference,
)
from tests.cuda_scripts.models import make_models

RUNNING = [program for program in PROGRAMS if program not in UNSUPPORTED]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    preload()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the models use deprecated classes
        return make_models(tmp_path_factory.mktemp("models"))


def find_reference(program: str, models: Path) -> ProgramOutcome | None:
    return None if program in WITHOUT_REFERENCE or program in UNSUPPORTED else run_reference(program, models)


@pytest.mark.long
@NEEDS_RECIPES
@pytest.mark.parametrize("number", range(0, len(PROGRAMS), 12), ids=PROGRAMS[::12])
def test_program_runs_on_a_device(number: int, models: Path) -> None:
    program, device = PROGRAMS[number], DEVICES[number // 12 % len(DEVICES)]
    outcome = run_on(device, program, models)
    assert compare(outcome, find_reference(program, models)) == "", outcome.stderr


@pytest.mark.long
@NEEDS_RECIPES
@pytest.mark.parametrize(
    ("program", "device"), [("modular", "hpu"), ("modular_blocks", "neuron"), ("modular_offload", "mps")]
)
def test_modular_programs_on_a_device(program: str, device: str, models: Path) -> None:
    outcome = run_on(device, program, models)
    assert compare(outcome, find_reference(program, models)) == "", outcome.stderr


@NEEDS_RECIPES
@pytest.mark.slow
def test_90_percent_run_unmodified_on_every_device_and_the_others_give_a_reason(models: Path) -> None:
    problems = {}
    for program in PROGRAMS:
        reference = find_reference(program, models)
        for device in DEVICES:
            problem = compare(run_on(device, program, models), reference)
            if problem:
                problems[program, device] = problem
    assert problems == {}
    assert len(RUNNING) >= 30
    assert len(RUNNING) / len(PROGRAMS) >= 0.9


@pytest.mark.long
@NEEDS_RECIPES
@pytest.mark.parametrize("run", ["run_cli_forked", pytest.param("run_cli", marks=pytest.mark.slow)])
def test_run_command_runs_a_script_like_python(
    run: str, models: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Slow in a new process. `test_arguments_path_and_exit_status_of_a_script` starts one too, without diffusers."""
    arguments = [str(models), str(tmp_path), "--steps", "3"]
    script = str(find_program("command_line"))
    call: RunCli = request.getfixturevalue(run)
    done = call("run", script, *arguments, "--device", "virtual:neuron", HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "castle.png").is_file()
    assert "mapped 'cuda' to neuron:0 (virtual) on 3 lines; 1 pipeline placed" in done.stderr
    assert done.stdout == ""


SCRIPT = """
import os, sys, pathlib
assert __name__ == "__main__" and sys.modules["__main__"].__dict__ is globals()
assert sys.argv == [os.environ["WANTED"], "--device", "cuda", "-v"], sys.argv
assert pathlib.Path(sys.path[0]).resolve() == pathlib.Path(__file__).resolve().parent
too_early = {"diffusers", "transformers", "huggingface_hub"} & set(sys.modules)
assert not too_early, "a script must be able to set environment variables first"
import beside, torch
assert not hasattr(torch.cuda, "nonsense") and torch.zeros(2, device="cuda").is_cuda
print(torch.ones(2, device="cuda:0").sum().item(), torch.cuda.get_device_capability())
sys.exit(7)
"""


def test_arguments_path_and_exit_status_of_a_script(run_cli: RunCli, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("")
    call = ["run", "--verbose", "--device", "virtual:npu", str(script), "--device", "cuda", "-v"]
    done = run_cli(*call, WANTED=str(script))
    assert done.returncode == 7, done.stderr
    assert done.stdout == "2.0 (0, 0)\n"
    assert f"anyaccel: {script}:9: zeros" in done.stderr
    assert f"{script}:10: get_device_capability returned (0, 0): the device has no CUDA" in done.stderr


def test_traceback_starts_at_the_script(run_cli_forked: RunCli, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import torch\n\ngraph = torch.cuda.CUDAGraph()\n")
    done = run_cli_forked("run", str(script), "--device=virtual:mlu")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith(f'Traceback (most recent call last):\n  File "{script}", line 3, in <module>')
    assert f"{script}:3: torch.cuda.CUDAGraph cannot be mapped to mlu:0 (virtual)" in done.stderr
    assert "hint: " in done.stderr


def test_invalid_device_index_is_reported_with_its_line(run_cli_forked: RunCli, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text('import torch\ntorch.zeros(2, device="cuda:1")\n')
    done = run_cli_forked("run", "--device", "virtual:xpu", str(script))
    assert done.returncode == 1
    assert f"{script}:2: zeros uses cuda:1, which does not exist: cuda:0 is mapped to xpu:0" in done.stderr


def test_script_runs_on_the_cpu(run_cli_forked: RunCli, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text('import torch\nprint(torch.ones(3).cuda().device, torch.Generator("cuda").device)\n')
    done = run_cli_forked("run", "--device", "cpu", str(script))
    assert (done.returncode, done.stdout) == (0, "cpu cpu\n"), done.stderr


@NEEDS_RECIPES
def test_models_of_a_script_are_loaded_completely_on_the_cpu(run_cli_forked: RunCli, tmp_path: Path) -> None:
    # transformers finds out with `torch.tensor([])` whether it is inside `torch.device("meta")`.
    pipe: Any = recipes()["stable-diffusion"].make()
    pipe.text_encoder.save_pretrained(tmp_path / "text_encoder")
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\nfrom transformers import CLIPTextModel\n"
        'with torch.device("meta"):\n    print(torch.tensor([]).device)\n'
        f'model = CLIPTextModel.from_pretrained({str(tmp_path / "text_encoder")!r}).to("cuda")\n'
        "(positions,) = [value for name, value in model.named_buffers() if name.endswith('position_ids')]\n"
        "print(torch.equal(positions[0], torch.arange(positions.shape[1])))\n"
    )
    done = run_cli_forked("run", "--device", "cpu", str(script))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "meta\nTrue\n"


@NEEDS_RECIPES
@pytest.mark.parametrize("device", ["cpu", "virtual:mps"])
@pytest.mark.parametrize(
    "move", ["to('cuda')", "enable_model_cpu_offload()", "enable_group_offload('cuda', offload_type='leaf_level')"]
)
def test_a_model_keeps_weights_that_were_loaded_in_another_dtype(
    run_cli_forked: RunCli, tmp_path: Path, device: str, move: str
) -> None:
    pipe: Any = recipes()["stable-diffusion"].make()
    pipe.save_pretrained(tmp_path / "model")
    script = tmp_path / "script.py"
    script.write_text(
        "import diffusers, torch\n"
        f"folder = {str(tmp_path / 'model')!r}\n"
        "vae = diffusers.AutoencoderKL.from_pretrained(folder, subfolder='vae', torch_dtype=torch.float32)\n"
        "pipe = diffusers.StableDiffusionPipeline.from_pretrained(folder, vae=vae, torch_dtype=torch.float16)\n"
        "before = {name: weight.clone() for name, weight in vae.state_dict().items()}\n"
        f"pipe.{move}\n"
        "assert all(torch.equal(before[name], w.cpu()) for name, w in pipe.vae.state_dict().items())\n"
        "print(pipe.vae.dtype, pipe.unet.dtype)\n"
    )
    done = run_cli_forked("run", "--device", device, str(script))
    assert (done.returncode, done.stdout) == (0, "torch.float32 torch.float16\n"), done.stderr


@NEEDS_RECIPES
def test_a_cast_of_the_script_casts_all_weights(run_cli_forked: RunCli, tmp_path: Path) -> None:
    pipe: Any = recipes()["wan"].make()
    pipe.save_pretrained(tmp_path / "model")
    script = tmp_path / "script.py"
    script.write_text(
        "import diffusers, torch\n"
        f"pipe = diffusers.WanPipeline.from_pretrained({str(tmp_path / 'model')!r}).to('cuda', torch.bfloat16)\n"
        "print({weight.dtype for weight in pipe.transformer.parameters()})\n"
    )
    done = run_cli_forked("run", "--device", "cpu", str(script))
    assert (done.returncode, done.stdout) == (0, "{torch.bfloat16}\n"), done.stderr


def test_interrupt_exits_with_130(run_cli_forked: RunCli, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    # Set the handler: a background process ignores SIGINT.
    handler = "signal.signal(signal.SIGINT, signal.default_int_handler)"
    script.write_text(f"import os, signal\n{handler}\nos.kill(os.getpid(), signal.SIGINT)\n")
    done = run_cli_forked("run", "--device", "cpu", str(script))
    assert done.returncode == 130
    assert f'File "{script}", line 3' in done.stderr


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (["run", "nowhere.py"], "nowhere.py does not exist"),
        (["run", "."], ". is a folder"),
        (["run", "x.py", "--device"], "--device requires a device name"),
        (["run", "--device", "virtual:nueron", __file__], "nueron"),
    ],
)
def test_invalid_command_line_is_rejected(run_cli_forked: RunCli, call: list[str], message: str) -> None:
    done = run_cli_forked(*call)
    assert done.returncode == 2
    assert message in done.stderr
    assert "hint: " in done.stderr


class SharedLoader(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """A loader of two modules, one of which imports the other."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self) if name in ("shared_outer", "shared_inner") else None

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == "shared_outer":
            importlib.import_module("shared_inner")


def test_a_patch_applies_to_its_module_only_if_others_have_the_same_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    patched: list[str] = []
    migration: Any = None
    finder = _PatchOnImport({"shared_outer": lambda module, _: patched.append(module.__name__)}, migration)
    monkeypatch.setattr(sys, "meta_path", [finder, SharedLoader(), *sys.meta_path])
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    importlib.import_module("shared_outer")
    assert patched == ["shared_outer"]


def test_device_option_is_split_from_script_arguments() -> None:
    assert split_device(["a", "--device", "hpu:3", "--steps", "2"]) == ("hpu:3", ["a", "--steps", "2"])
    assert split_device(["--device=mps", "--", "--device", "cuda"]) == ("mps", ["--device", "cuda"])
    assert split_device(["--", "--device", "cuda"]) == (None, ["--device", "cuda"])
    with pytest.raises(UsageError):
        split_device(["--device"])

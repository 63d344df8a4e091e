"""`anyaccel run`: scripts that were written for CUDA, unedited, on virtual devices.

Every third program runs on one device here, in turn; `python -m tests.scripts` and the slow test run all on all.
"""

import warnings
from pathlib import Path

import pytest

from anyaccel.cli.run import split_device
from anyaccel.errors import UsageError
from tests.conftest import NEEDS_RECIPES, RunCli
from tests.cuda_scripts.matrix import (
    DEVICES,
    PROGRAMS,
    REFUSED,
    WITHOUT_REFERENCE,
    Outcome,
    compare,
    find_program,
    preload,
    run_on,
    run_reference,
)
from tests.cuda_scripts.models import make_models

RUNNING = [program for program in PROGRAMS if program not in REFUSED]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    preload()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of deprecated classes that the models are made of
        return make_models(tmp_path_factory.mktemp("models"))


def find_reference(program: str, models: Path) -> Outcome | None:
    return None if program in WITHOUT_REFERENCE or program in REFUSED else run_reference(program, models)


@pytest.mark.long
@NEEDS_RECIPES
@pytest.mark.parametrize("number", range(0, len(PROGRAMS), 3), ids=PROGRAMS[::3])
def test_a_program_runs_on_a_device(number: int, models: Path) -> None:
    program, device = PROGRAMS[number], DEVICES[number // 3 % len(DEVICES)]
    outcome = run_on(device, program, models)
    assert compare(outcome, find_reference(program, models)) == "", outcome.stderr


@NEEDS_RECIPES
@pytest.mark.slow
def test_nine_in_ten_run_unedited_on_every_device_and_the_rest_say_why(models: Path) -> None:
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
def test_the_command_runs_a_script_as_python_would(run_cli: RunCli, models: Path, tmp_path: Path) -> None:
    arguments = [str(models), str(tmp_path), "--steps", "3"]
    script = str(find_program("command_line"))
    done = run_cli("run", script, *arguments, "--device", "virtual:neuron", HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "castle.png").is_file()
    assert "'cuda' meant neuron:0 (virtual) in 3 places; 1 pipeline was placed" in done.stderr
    assert done.stdout == ""


SCRIPT = """
import os, sys, pathlib
assert __name__ == "__main__" and sys.modules["__main__"].__dict__ is globals()
assert sys.argv == [os.environ["WANTED"], "--device", "cuda", "-v"], sys.argv
assert pathlib.Path(sys.path[0]).resolve() == pathlib.Path(__file__).resolve().parent
too_early = {"diffusers", "transformers", "huggingface_hub"} & set(sys.modules)
assert not too_early, "what a script sets in the environment must count"
import beside, torch
assert not hasattr(torch.cuda, "nonsense") and torch.zeros(2, device="cuda").is_cuda
print(torch.ones(2, device="cuda:0").sum().item(), torch.cuda.get_device_capability())
sys.exit(7)
"""


def test_arguments_path_and_exit_status_are_the_scripts_own(run_cli: RunCli, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("")
    call = ["run", "--verbose", "--device", "virtual:npu", str(script), "--device", "cuda", "-v"]
    done = run_cli(*call, WANTED=str(script))
    assert done.returncode == 7, done.stderr
    assert done.stdout == "2.0 (0, 0)\n"
    assert f"anyaccel: {script}:9: zeros" in done.stderr
    assert f"{script}:10: no compute capability is like this device's, and (0, 0) was answered" in done.stderr


def test_an_error_is_shown_from_the_scripts_line_on(run_cli_forked: RunCli, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import torch\n\ngraph = torch.cuda.CUDAGraph()\n")
    done = run_cli_forked("run", str(script), "--device=virtual:mlu")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith(f'Traceback (most recent call last):\n  File "{script}", line 3, in <module>')
    assert f"{script}:3: torch.cuda.CUDAGraph cannot be mapped to mlu:0 (virtual)" in done.stderr
    assert "hint: " in done.stderr


def test_a_device_that_is_not_there_is_named_with_its_line(run_cli_forked: RunCli, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text('import torch\ntorch.zeros(2, device="cuda:1")\n')
    done = run_cli_forked("run", "--device", "virtual:xpu", str(script))
    assert done.returncode == 1
    assert f"{script}:2: zeros asks for cuda:1, and from xpu:0 on there is no such device" in done.stderr


def test_the_host_is_a_device_too(run_cli_forked: RunCli, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text('import torch\nprint(torch.ones(3).cuda().device, torch.Generator("cuda").device)\n')
    done = run_cli_forked("run", "--device", "cpu", str(script))
    assert (done.returncode, done.stdout) == (0, "cpu cpu\n"), done.stderr


def test_an_interruption_ends_it_with_130(run_cli: RunCli, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    # Set anew, since a process that was started in the background ignores interruptions.
    handler = "signal.signal(signal.SIGINT, signal.default_int_handler)"
    script.write_text(f"import os, signal\n{handler}\nos.kill(os.getpid(), signal.SIGINT)\n")
    done = run_cli("run", "--device", "cpu", str(script))
    assert done.returncode == 130
    assert f'File "{script}", line 3' in done.stderr


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (["run", "nowhere.py"], "nowhere.py is not there"),
        (["run", "."], ". is a folder"),
        (["run", "x.py", "--device"], "--device requires a device"),
        (["run", "--device", "virtual:nueron", __file__], "nueron"),
    ],
)
def test_a_wrong_call_is_said_to_be_wrong(run_cli_forked: RunCli, call: list[str], words: str) -> None:
    done = run_cli_forked(*call)
    assert done.returncode == 2
    assert words in done.stderr
    assert "hint: " in done.stderr


def test_our_option_among_the_scripts_arguments() -> None:
    assert split_device(["a", "--device", "hpu:3", "--steps", "2"]) == ("hpu:3", ["a", "--steps", "2"])
    assert split_device(["--device=mps", "--", "--device", "cuda"]) == ("mps", ["--device", "cuda"])
    assert split_device(["--", "--device", "cuda"]) == (None, ["--device", "cuda"])
    with pytest.raises(UsageError):
        split_device(["--device"])

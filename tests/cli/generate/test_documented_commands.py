"""The commands in the tables of the documentation, each run with a tiny model of the same class and tiny inputs."""

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from anyaccel.cli.main import main
from anyaccel.generation.media_format import read_metadata
from anyaccel.generation.model_loading import release_model
from tests.cli.generate.documented_commands import adapt_command, make_inputs, read_commands
from tests.conftest import NEEDS_RECIPES, run_in_fork

pytestmark = [NEEDS_RECIPES, pytest.mark.filterwarnings("ignore::FutureWarning")]

COMMANDS, EXAMPLES = read_commands("generate.md"), read_commands("examples.md")
KINDS = {".png": "image", ".jpg": "image", ".webp": "image", ".wav": "audio", ".flac": "audio"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the input files of all commands."""
    for package in ("av", "soundfile", "ftfy", "peft"):
        pytest.importorskip(package)
    yield make_inputs(tmp_path_factory.mktemp("inputs"))
    release_model()


def run(monkeypatch: pytest.MonkeyPatch, capfd: Any, arguments: list[str]) -> tuple[int, str, str]:
    if any(argument.startswith("virtual:") for argument in arguments):
        done = run_in_fork(main, ["anyaccel", *arguments], {})  # a process cannot stop its virtual device
        return done.returncode, done.stdout, done.stderr
    monkeypatch.setattr(sys, "argv", ["anyaccel", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    return (int(caught.value.code or 0), *capfd.readouterr())


def read_output(command: str) -> str:
    words = shlex.split(command)
    return words[words.index("-o") + 1]


def find_kind(name: str) -> str:
    return "video" if name == "cat.webp" else KINDS.get(Path(name).suffix, "video")


def test_documentation_has_the_commands() -> None:
    assert (len(COMMANDS), len(EXAMPLES)) == (14, 30)


@pytest.mark.parametrize("command", [command for command in COMMANDS if "--from" not in command])
def test_command(command: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, err = run(monkeypatch, capfd, adapt_command(command, folder))
    assert status == 0, err
    output = read_output(command)
    assert out.splitlines()[0] == f"{output}  seed 7"
    (metadata,) = read_metadata(output)
    assert metadata.kind == find_kind(output)
    if "--grid" in command:
        with Image.open("fox-grid.png") as sheet:
            assert sheet.width > 2 * 32
    # --from repeats the result from the file alone.
    again = f"again{Path(output).suffix}"
    status, out, err = run(monkeypatch, capfd, ["generate", "--from", output, "-o", again])
    assert status == 0, err
    assert "warning" not in err
    assert Path(again).read_bytes() == Path(output).read_bytes()


@pytest.mark.long
@pytest.mark.parametrize("command", EXAMPLES)
def test_example(command: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, err = run(monkeypatch, capfd, adapt_command(command, folder))
    assert status == 0, err
    assert "warning" not in err
    names = [line.split("  ")[0] for line in out.splitlines()]
    output = read_output(command)
    assert all(name.startswith(output) if output.endswith("/") else name == output for name in names)
    count = {"-n 4 --grid": 4, "prompts.txt": 2}
    assert len([name for name in names if "grid" not in name]) == next((n for x, n in count.items() if x in command), 1)
    for name in names:
        metadata = read_metadata(name)[0]
        assert metadata.kind == find_kind(name)


def test_from_with_another_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    pytest.importorskip("av")
    monkeypatch.chdir(tmp_path)
    video = next(command for command in COMMANDS if "Wan" in command)
    again = next(command for command in COMMANDS if "--from" in command)
    assert run(monkeypatch, capfd, adapt_command(video, tmp_path))[0] == 0
    assert run(monkeypatch, capfd, shlex.split(again))[:2] == (0, "fox2.mp4  seed 8\n")
    first, second = read_metadata("fox.mp4")[0], read_metadata("fox2.mp4")[0]
    assert (first.call, first.frames, first.fps) == (second.call, second.frames, second.fps)
    assert first.scheduler_config == second.scheduler_config

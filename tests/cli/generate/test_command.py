"""`anyaccel generate` as a user runs it: output, files and exit statuses."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from anyaccel.cli.generate.options import Options
from anyaccel.cli.generate.runner import GenerateRun
from anyaccel.cli.interrupts import Interruption
from anyaccel.cli.main import main
from anyaccel.errors import UsageError
from anyaccel.generation.generate import generate
from anyaccel.generation.image_format import encode_image, read_metadata
from anyaccel.generation.model_loading import release_model
from anyaccel.recipes import recipes
from tests.cli.terminal import run_command, run_on_terminal
from tests.conftest import NEEDS_RECIPES, RunCli

pytestmark = NEEDS_RECIPES
CTRL_C = b"\x03"


@dataclass(frozen=True)
class Completed:
    """Exit status and output of a command."""

    status: int
    stdout: str
    stderr: str

    @property
    def paths(self) -> list[str]:
        return [line.split("  ")[0] for line in self.stdout.splitlines()]


Run = Callable[..., Completed]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    pipe: Any = recipes()["stable-diffusion"].make()
    folder = tmp_path_factory.mktemp("model")
    pipe.save_pretrained(folder)
    yield str(folder)
    release_model()


@pytest.fixture
def run(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Run the command in this process, in an empty folder, with the tiny model by default."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ANYACCEL_DEVICE", raising=False)

    def run_here(*arguments: str) -> Completed:
        has_model = "--model" in arguments or "--from" in arguments
        monkeypatch.setattr(
            sys, "argv", ["anyaccel", "generate", *arguments, *([] if has_model else ["--model", model])]
        )
        with pytest.raises(SystemExit) as caught:
            main()
        out, err = capfd.readouterr()
        return Completed(int(caught.value.code or 0), out, err)

    return run_here


def run_forked_command(arguments: list[str], stdout: int = 1, end_at: int | None = None) -> int:
    """Run the command in a fork of this process and return its exit status.

    Send SIGTERM to it as soon as `end_at` becomes readable.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork with threads
        process = os.fork()
    if process == 0:
        os.dup2(stdout, 1)
        run_command(arguments, {})
    if end_at is not None:
        os.read(end_at, 1)
        os.kill(process, signal.SIGTERM)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def pixels(path: str | Path) -> bytes:
    with Image.open(path) as image:
        return image.tobytes()


def test_image_path_and_seed_are_printed(run: Run, tmp_path: Path) -> None:
    release_model()  # the placement is printed only when the model is loaded
    completed = run("a red apple", "--seed", "7", "--steps", "2")
    assert (completed.status, completed.stdout) == (0, "a-red-apple-7.png  seed 7\n")
    # The dtype depends on which dtypes are fast on this CPU.
    assert re.fullmatch(r"\S+ on cpu:0 in (float32|bfloat16|float16)\n", completed.stderr)
    (metadata,) = read_metadata("a-red-apple-7.png")
    assert (metadata.prompt, metadata.seed, metadata.steps) == ("a red apple", 7, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["a-red-apple-7.png"]


def test_same_command_gives_the_same_file_and_overwrites_nothing(run: Run) -> None:
    command = ["a red apple", "--seed", "7", "--steps", "2"]
    paths = [run(*command).paths[0] for _ in range(2)]
    assert paths == ["a-red-apple-7.png", "a-red-apple-7-2.png"]
    assert Path(paths[0]).read_bytes() == Path(paths[1]).read_bytes()
    assert run(*command, "--force").paths == paths[:1]


@pytest.mark.slow
def test_separate_process_and_python_generate_the_same_image(
    run_cli: RunCli, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run in a new process, which does not share the imports and caches of other tests."""
    monkeypatch.chdir(tmp_path)
    completed = run_cli(
        "generate", "a red apple", "--seed", "7", "--steps", "2", "--model", model, "-o", "a.png", "--dtype", "float32"
    )
    assert (completed.returncode, completed.stdout) == (0, "a.png  seed 7\n"), completed.stderr
    assert completed.stderr.count("\n") == 1, completed.stderr
    assert "\x1b" not in completed.stdout + completed.stderr
    result = generate("a red apple", model, seed=7, num_inference_steps=2, dtype="float32")
    assert encode_image(result[0], ".png", result.metadata) == Path("a.png").read_bytes()


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp"])
def test_from_regenerates_an_image(run: Run, suffix: str) -> None:
    run("a red apple", "-n", "2", "--seed", "7", "--steps", "2", "--negative", "snow", "--size", "24x16", "-o", "a.png")
    run(
        "a red apple",
        "-n",
        "2",
        "--seed",
        "7",
        "--steps",
        "2",
        "--negative",
        "snow",
        "--size",
        "24x16",
        "-o",
        f"b.{suffix}",
    )
    completed = run("--from", f"b-2.{suffix}", "-o", "again.png")
    assert completed.status == 0, completed.stderr
    assert "warning" not in completed.stderr
    assert pixels("again.png") == pixels("a-2.png")
    assert Path("again.png").read_bytes() == Path("a-2.png").read_bytes()


def test_from_accepts_overrides(run: Run) -> None:
    run("a red apple", "--seed", "7", "--steps", "2", "-o", "a.png")
    run("a red apple", "--seed", "8", "--steps", "3", "--guidance", "3", "-o", "b.png")
    completed = run("--from", "a.png", "--seed", "8", "--steps", "3", "--guidance", "3", "-o", "c.png")
    assert completed.stdout == "c.png  seed 8\n"
    assert Path("c.png").read_bytes() == Path("b.png").read_bytes()


def test_from_warns_about_differences(run: Run, model: str, tmp_path: Path) -> None:
    run("a red apple", "--seed", "7", "--steps", "2", "-o", "a.png")
    (metadata,) = read_metadata("a.png")
    older = replace(metadata, versions={**metadata.versions, "torch": "2.6.0"}, device="neuron:0", revision="sha256:0")
    with Image.open("a.png") as image:
        Path("older.png").write_bytes(encode_image(image, ".png", [older]))
    completed = run("--from", "older.png", "-o", "again.png")
    assert completed.status == 0
    assert "warning: torch was 2.6.0 and is now " in completed.stderr
    assert "warning: the revision was sha256:0 and is now sha256:" in completed.stderr
    assert "warning: the device was neuron and is now cpu; the image may differ" in completed.stderr

    gone = replace(metadata, model=str(tmp_path / "gone"))
    Path("gone.png").write_bytes(encode_image(Image.new("RGB", (8, 8)), ".png", [gone]))
    completed = run("--from", "gone.png")
    assert completed.status == 2
    assert "gone, which is not available" in completed.stderr
    assert "hint: pass the Hub ID or folder of this model with --model" in completed.stderr
    assert run("--from", "gone.png", "--model", model, "-o", "found.png").status == 0
    assert pixels("found.png") == pixels("a.png")


def test_several_prompts_and_a_contact_sheet(run: Run) -> None:
    Path("prompts.txt").write_text("\ufeff# things\n\na blue boat\n  a green tree  \n", encoding="utf-8")
    completed = run(
        "a red apple", "--prompts", "prompts.txt", "-n", "2", "--seed", "7", "--steps", "1", "--grid", "-o", "out/"
    )
    things = ["a-red-apple", "a-blue-boat", "a-green-tree"]
    assert completed.paths == [
        *(f"out/{thing}-{seed}.png" for thing in things for seed in (7, 8)),
        "out/a-red-apple-7-grid.png",
    ]
    metadata = read_metadata(completed.paths[-1])
    assert [(item.prompt, item.seed) for item in metadata][:3] == [
        ("a red apple", 7), ("a red apple", 8), ("a blue boat", 7),
    ]  # fmt: skip
    with Image.open(completed.paths[-1]) as sheet:
        assert sheet.height > sheet.width, "two columns, three rows"
    again = run("--from", completed.paths[-1], "-o", "again/")
    assert [pixels(name) for name in again.paths] == [pixels(name) for name in completed.paths[:-1]]


def test_json_prints_one_document_and_nothing_else(run: Run) -> None:
    completed = run(
        "x", "-n", "2", "--seed", "7", "--steps", "1", "-o", "a.webp", "--grid", "--json", "--dtype", "float32"
    )
    first, second = json.loads(completed.stdout)
    assert (first["path"], second["path"], second["grid"]) == ("a-1.webp", "a-2.webp", "a-grid.webp")
    expected = {"prompt": "x", "seed": 8, "width": 16, "height": 16, "dtype": "float32", "device": "cpu:0", "steps": 1}
    assert expected.items() <= second.items()
    assert second["seconds"] > 0
    assert second["virtual"] is False


def test_stdout_receives_one_image(
    capfdbinary: pytest.CaptureFixture[bytes], model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["generate", "x", "--seed", "7", "--steps", "1", "--model", model, "-o", "-"]
    assert run_forked_command(command) == 0
    out, err = capfdbinary.readouterr()
    Path("piped.png").write_bytes(out)
    assert read_metadata("piped.png")[0].seed == 7
    assert err.decode().splitlines()[-1] == "seed 7"


def test_closed_pipe_leaves_no_traceback(run: Run, capfd: pytest.CaptureFixture[str], model: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    for output, status in (([], 0), (["-o", "-"], 1)):  # only stdout needs a reader
        command = ["generate", "x", "--seed", "7", "--steps", "1", "--model", model, *output]
        assert run_forked_command(command, stdout=writer) == status
        assert "Traceback" not in capfd.readouterr().err
    os.close(writer)


def test_explain_prints_the_plan_and_generates_nothing(run: Run, tmp_path: Path) -> None:
    completed = run("--explain")
    assert completed.stdout.startswith("StableDiffusionPipeline on cpu:0: CPU")
    assert "noise" in completed.stdout
    plan = json.loads(run("--explain", "--json").stdout)
    assert {"name", "value", "reason"} == set(plan["decisions"][0])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        ([], "missing prompt", 'anyaccel generate "a red apple"'),
        (["x", "--size", "0"], "width must be an integer from 1 to 16384 pixels, not 0", "512x768"),
        (["x", "--size", "17"], "height must be a multiple of 2 for this model, not 17", "use 16 or 18"),
        (["x", "--size", "1000000000"], "width must be an integer from 1 to 16384 pixels", "512x768"),
        (["x", "--size", "0x0"], "width must be an integer from 1 to 16384 pixels, not 0", "512x768"),
        (["x", "--size", "abc"], "invalid image size 'abc'", "512x768"),
        (["x", "--size", "17x16"], "width must be a multiple of 2 for this model, not 17", "use 16 or 18"),
        (["x", "--size", "100000x64"], "width must be an integer from 1 to 16384 pixels", "512x768"),
        (["x", "--guidance", "nan"], "the guidance scale must be finite, not nan", "--guidance 5"),
        (["x", "--guidance", "inf"], "the guidance scale must be finite, not inf", "--guidance 5"),
        (["x", "--model", ""], "the model name is empty", "embedded"),
        (["x", "--steps", "0"], "a positive integer, not 0", "--steps 20"),
        (["x", "-n", "0"], "the number of images per prompt must be at least 1, not 0", "-n 1"),
        (
            ["x", "--seed", "-1"],
            "a seed must be an integer from 0 to 2**64 - 1, not -1",
            "omit --seed for a random one",
        ),
        (["x", "--seed", str(2**64)], "a seed must be an integer", "--seed 7"),
        (["--prompts", "missing.txt"], "cannot read missing.txt", "one prompt per line"),
        (["--prompts", "empty.txt"], "empty.txt contains no prompts", "one prompt per line"),
        (["--prompts", "latin.txt"], "line 2 of latin.txt is not valid UTF-8", "save the file as UTF-8"),
        (["x", "-o", "a.bmp"], "unknown suffix '.bmp'", ".png"),
        (["x", "-o", "empty.txt/a.png"], "is not a valid file name", "-o"),
        (["x", "-o", "taken.png"], "taken.png already exists", "--force"),
        (["x", "-n", "2", "-o", "some.png"], "some-2.png already exists", "--force"),
        (["x", "--grid", "-o", "sheet.png"], "sheet-grid.png already exists", "--force"),
        (["x", "y", "-o", "-"], "cannot write 2 images to stdout", "--grid"),
        (["x", "-o", "-", "--json"], "both write to stdout", "-o image.png"),
        (["x", "--model", "."], "is not a pipeline", "save_pretrained"),
        (["x", "--model", "./nowhere"], "does not exist", "path"),
        (["x", "--device", "nueron"], "unknown device 'nueron'", "did you mean neuron?"),
        (["x", "--dtype", "int8"], "a floating-point dtype", "float32"),
        (["--from", "taken.png"], "taken.png is not a valid file of a supported format", "written by anyaccel"),
        (["--from", "taken.png", "x"], "cannot be combined with a prompt", "omit --from or the prompt"),
        (["x", "--show", "sixle"], "unknown value 'sixle' for --show", "did you mean sixel?"),
    ],
)
def test_usage_error_exits_with_status_2_and_a_hint(
    run: Run, tmp_path: Path, arguments: list[str], message: str, hint: str
) -> None:
    for name in ("empty.txt", "taken.png", "some-2.png", "sheet-grid.png"):
        (tmp_path / name).touch()
    (tmp_path / "latin.txt").write_bytes("apple\ngrün\n".encode("latin-1"))
    completed = run(*arguments)
    assert completed.status == 2, completed.stderr
    assert message in completed.stderr
    assert hint in completed.stderr.partition("hint:")[2]
    assert completed.stdout == ""
    assert len(list(tmp_path.iterdir())) == 5


def test_unavailable_device_exits_with_status_1(run: Run) -> None:
    completed = run("x", "--device", "mlu")
    assert completed.status == 1
    assert "mlu is not available" in completed.stderr


def test_file_created_during_the_run_is_kept_and_the_image_is_saved_elsewhere(run: Run, model: str) -> None:
    generate_run = GenerateRun(Options(prompts=["x"], model=model, seed=7, steps=1, output="a.png"))

    def write_first(done: int, total: int | None) -> None:
        Path("a.png").write_bytes(b"other process")

    generate_run.on_step = write_first  # type: ignore[method-assign]
    with pytest.raises(UsageError, match=r"the image was saved to a-2\.png"):
        generate_run.run()
    assert Path("a.png").read_bytes() == b"other process"
    assert read_metadata("a-2.png")[0].seed == 7


def test_help_and_usage_errors_import_no_torch() -> None:
    code = (
        "import sys\nfrom anyaccel.cli.main import main\n"
        "sys.argv = ['anyaccel', 'generate', *sys.argv[1:]]\n"
        "try:\n    main()\n"
        "except SystemExit:\n    print(sorted({'torch', 'diffusers', 'numpy', 'PIL'} & set(sys.modules)))"
    )
    for arguments in (["--help"], ["x", "--size", "0"], ["x", "-o", "a.bmp"], ["x", "--model", "/nowhere/at/all"]):
        completed = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
        assert completed.stdout.splitlines()[-1] == "[]", completed.stderr


# On a terminal.


@pytest.fixture
def command(model: str, run: Run) -> list[str]:
    run("warm", "--steps", "1", "-o", "warm.png")  # loads the model, which forks of this process inherit
    return ["generate", "a red apple", "--model", model, "--seed", "7"]


def test_terminal_shows_bars_and_images(command: list[str]) -> None:
    screen = run_on_terminal([*command, "b", "--steps", "3"], environment={"COLORTERM": "truecolor"})
    assert screen.status == 0, screen.text
    assert "a-red-apple-7.png  seed 7" in screen.text
    assert re.search("Generating image 1 of 2 .* step 3/3", screen.text)
    assert "Generating image 2 of 2" in screen.text
    assert screen.text.count("▀") == 2 * 64 * 32
    assert b"\x1b[38;2;" in screen.output


@pytest.mark.parametrize(
    ("environment", "reply", "mark"),
    [
        ({"TERM": "xterm-kitty"}, b"", b"\x1b_Gf=100,a=T"),
        ({"TERM_PROGRAM": "iTerm.app"}, b"", b"\x1b]1337;File=inline=1"),
        ({}, b"\x1b[?62;4;22c", b"\x1bPq"),
        ({}, b"\x1b[?62;22c", b"\x1b[38;5;"),
    ],
)
def test_protocol_of_the_terminal_is_used(
    command: list[str], environment: dict[str, str], reply: bytes, mark: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reply:
        # The reply may be late on a busy machine.
        monkeypatch.setattr("anyaccel.cli.terminal_image._QUERY_TIMEOUT_S", 30.0)
    screen = run_on_terminal([*command, "--steps", "1"], environment=environment, reply=reply)
    assert screen.status == 0, screen.text
    assert mark in screen.output
    assert ("▀" in screen.text) == (b"38;5" in mark)


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_terminal_without_colors_gets_none(command: list[str], environment: dict[str, str]) -> None:
    screen = run_on_terminal([*command, "--steps", "1"], environment=environment)
    assert "a-red-apple-7.png  seed 7" in screen.text
    assert "▀" not in screen.text
    assert re.search(rb"\x1b\[[0-9;]*[34]8;", screen.output) is None
    if "TERM" in environment:
        assert b"\x1b" not in screen.output


def test_narrow_terminal(command: list[str]) -> None:
    screen = run_on_terminal([*command, "--steps", "1"], columns=10, lines=6)
    assert screen.status == 0
    assert "▀" * 8 in screen.text
    assert "a-red-apple-7.png" in screen.text.replace("\r\n", "")


def test_terminal_receives_no_binary_data(command: list[str]) -> None:
    screen = run_on_terminal([*command, "-o", "-"])
    assert screen.status == 2
    assert "refusing to write binary data to the terminal" in screen.text


def test_ctrl_c_stops_at_the_next_step_and_keeps_finished_images(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = GenerateRun.on_step

    def on_step(run: GenerateRun, *args: Any, **kwargs: Any) -> Any:
        while len(run.finished) == 1 and not run.interruption.requested:  # image 2 waits until Ctrl-C is pressed
            time.sleep(0.01)
        return original(run, *args, **kwargs)

    monkeypatch.setattr(GenerateRun, "on_step", on_step)
    screen = run_on_terminal([*command, "b", "c", "--steps", "60", "--show", "never"], press=(b"image 2 of 3", CTRL_C))
    assert screen.status == 130
    assert "interrupted: 1 of 3 images were generated" in screen.text
    assert "Traceback" not in screen.text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a-red-apple-7.png", "warm.png"]


def test_ctrl_c_before_the_first_step_stops_immediately(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GenerateRun, "_load", lambda run, task: time.sleep(60))
    screen = run_on_terminal(command, press=(b"Starting", CTRL_C))
    assert screen.status == 130
    assert "interrupted" in screen.text
    assert "Traceback" not in screen.text


def test_sigterm_does_not_wait_for_a_step(command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()

    def on_step(run: GenerateRun, *args: Any, **kwargs: Any) -> None:
        os.write(writer, b"x")
        time.sleep(60)

    monkeypatch.setattr(GenerateRun, "on_step", on_step)
    assert run_forked_command([*command, "--steps", "9"], end_at=reader) == 128 + signal.SIGTERM
    os.close(reader)
    os.close(writer)
    assert [path.name for path in tmp_path.iterdir()] == ["warm.png"]


def in_fork(work: Callable[[], object]) -> int:
    process = os.fork()
    if process == 0:
        try:
            work()
        finally:
            os._exit(77)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_second_ctrl_c_waits_only_for_a_file_that_is_being_written(tmp_path: Path) -> None:
    events: list[str] = []
    interruption = Interruption(on_wait=lambda: events.append("wait"), on_end=lambda: (tmp_path / "ended").touch())

    def press_twice() -> None:
        with interruption.handling(), interruption.at_steps():
            os.kill(os.getpid(), signal.SIGINT)
            assert events == ["wait"]
            os.kill(os.getpid(), signal.SIGINT)

    def terminate_while_writing_a_file() -> None:
        with interruption.handling(), interruption.after_file():
            os.kill(os.getpid(), signal.SIGTERM)
            (tmp_path / "complete").touch()

    assert in_fork(press_twice) == 130
    assert (tmp_path / "ended").exists()
    assert in_fork(terminate_while_writing_a_file) == 128 + signal.SIGTERM
    assert (tmp_path / "complete").exists()

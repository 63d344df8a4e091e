"""`anyaccel generate`, as a user runs it: what it prints where, what it writes, and how it ends."""

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
from anyaccel.cli.generate.run import GenerateRun
from anyaccel.cli.interrupts import Interruption
from anyaccel.cli.main import main
from anyaccel.errors import UsageError
from anyaccel.generation.generate import generate
from anyaccel.generation.image_format import encode_image, read_metadata
from anyaccel.generation.model_cache import release_model
from anyaccel.recipes import recipes
from tests.cli.terminal import run_command, run_on_terminal
from tests.conftest import NEEDS_RECIPES, RunCli

pytestmark = NEEDS_RECIPES
CTRL_C = b"\x03"


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    status: int
    stdout: str
    stderr: str

    @property
    def names(self) -> list[str]:
        return [line.split("  ")[0] for line in self.stdout.splitlines()]


Run = Callable[..., Ended]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    pipe: Any = recipes()["stable-diffusion"].make()
    folder = tmp_path_factory.mktemp("model")
    pipe.save_pretrained(folder)
    yield str(folder)
    release_model()


@pytest.fixture
def run(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """The whole command in this process, in an empty folder, with the tiny model unless another is named."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ANYACCEL_DEVICE", raising=False)

    def run_here(*arguments: str) -> Ended:
        named = "--model" in arguments or "--from" in arguments
        monkeypatch.setattr(sys, "argv", ["anyaccel", "generate", *arguments, *([] if named else ["--model", model])])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capfd.readouterr()
        return Ended(int(ended.value.code or 0), out, err)

    return run_here


def run_forked_command(arguments: list[str], stdout: int = 1, end_at: int | None = None) -> int:
    """The command in a fork of this process, in which everything is imported; gives its exit status.

    It is told to end when something can be read from `end_at`.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads
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


def test_a_picture_its_path_and_its_seed(run: Run, tmp_path: Path) -> None:
    release_model()  # that it is loaded is told
    done = run("a red apple", "--seed", "7", "--steps", "2")
    assert (done.status, done.stdout) == (0, "a-red-apple-7.png  seed 7\n")
    assert re.fullmatch(r"\S+ on cpu:0 in (float32|bfloat16|float16)\n", done.stderr)  # what the host is fast in
    (origin,) = read_metadata("a-red-apple-7.png")
    assert (origin.prompt, origin.seed, origin.steps) == ("a red apple", 7, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["a-red-apple-7.png"]


def test_the_same_command_gives_the_same_file_and_overwrites_none(run: Run) -> None:
    command = ["a red apple", "--seed", "7", "--steps", "2"]
    names = [run(*command).names[0] for _ in range(2)]
    assert names == ["a-red-apple-7.png", "a-red-apple-7-2.png"]
    assert Path(names[0]).read_bytes() == Path(names[1]).read_bytes()
    assert run(*command, "--force").names == names[:1]


def test_a_process_of_its_own_and_python_make_the_same_picture(
    run_cli: RunCli, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one test that starts anew: nothing that the others have imported or kept may matter."""
    monkeypatch.chdir(tmp_path)
    done = run_cli(
        "generate", "a red apple", "--seed", "7", "--steps", "2", "--model", model, "-o", "a.png", "--dtype", "float32"
    )
    assert (done.returncode, done.stdout) == (0, "a.png  seed 7\n"), done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    made = generate("a red apple", model, seed=7, num_inference_steps=2, dtype="float32")
    assert encode_image(made[0], ".png", made.origins) == Path("a.png").read_bytes()


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp"])
def test_from_makes_a_picture_again(run: Run, suffix: str) -> None:
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
    done = run("--from", f"b-2.{suffix}", "-o", "again.png")
    assert done.status == 0, done.stderr
    assert "warning" not in done.stderr
    assert pixels("again.png") == pixels("a-2.png")
    assert Path("again.png").read_bytes() == Path("a-2.png").read_bytes()


def test_from_takes_changes(run: Run) -> None:
    run("a red apple", "--seed", "7", "--steps", "2", "-o", "a.png")
    run("a red apple", "--seed", "8", "--steps", "3", "--guidance", "3", "-o", "b.png")
    done = run("--from", "a.png", "--seed", "8", "--steps", "3", "--guidance", "3", "-o", "c.png")
    assert done.stdout == "c.png  seed 8\n"
    assert Path("c.png").read_bytes() == Path("b.png").read_bytes()


def test_from_says_what_is_not_as_it_was(run: Run, model: str, tmp_path: Path) -> None:
    run("a red apple", "--seed", "7", "--steps", "2", "-o", "a.png")
    (origin,) = read_metadata("a.png")
    older = replace(origin, versions={**origin.versions, "torch": "2.6.0"}, device="neuron:0", revision="sha256:0")
    with Image.open("a.png") as image:
        Path("older.png").write_bytes(encode_image(image, ".png", [older]))
    done = run("--from", "older.png", "-o", "again.png")
    assert done.status == 0
    assert "warning: torch was 2.6.0, and is " in done.stderr
    assert "warning: the revision was sha256:0, and is sha256:" in done.stderr
    assert "warning: the device was neuron, and is cpu: the picture may not be the same" in done.stderr

    gone = replace(origin, model=str(tmp_path / "gone"))
    Path("gone.png").write_bytes(encode_image(Image.new("RGB", (8, 8)), ".png", [gone]))
    done = run("--from", "gone.png")
    assert done.status == 2
    assert "gone, which is not here" in done.stderr
    assert "hint: --model says where it is now" in done.stderr
    assert run("--from", "gone.png", "--model", model, "-o", "found.png").status == 0
    assert pixels("found.png") == pixels("a.png")


def test_several_prompts_and_a_sheet(run: Run) -> None:
    Path("prompts.txt").write_text("\ufeff# things\n\na blue boat\n  a green tree  \n", encoding="utf-8")
    done = run(
        "a red apple", "--prompts", "prompts.txt", "-n", "2", "--seed", "7", "--steps", "1", "--grid", "-o", "out/"
    )
    things = ["a-red-apple", "a-blue-boat", "a-green-tree"]
    assert done.names == [
        *(f"out/{thing}-{seed}.png" for thing in things for seed in (7, 8)),
        "out/a-red-apple-7-grid.png",
    ]
    origins = read_metadata(done.names[-1])
    assert [(origin.prompt, origin.seed) for origin in origins][:3] == [
        ("a red apple", 7), ("a red apple", 8), ("a blue boat", 7),
    ]  # fmt: skip
    with Image.open(done.names[-1]) as sheet:
        assert sheet.height > sheet.width, "two columns, three rows"
    again = run("--from", done.names[-1], "-o", "again/")
    assert [pixels(name) for name in again.names] == [pixels(name) for name in done.names[:-1]]


def test_json_is_one_document_and_nothing_else(run: Run) -> None:
    done = run("x", "-n", "2", "--seed", "7", "--steps", "1", "-o", "a.webp", "--grid", "--json", "--dtype", "float32")
    first, second = json.loads(done.stdout)
    assert (first["path"], second["path"], second["grid"]) == ("a-1.webp", "a-2.webp", "a-grid.webp")
    wanted = {"prompt": "x", "seed": 8, "width": 16, "height": 16, "dtype": "float32", "device": "cpu:0", "steps": 1}
    assert wanted.items() <= second.items()
    assert second["seconds"] > 0
    assert second["virtual"] is False


def test_stdout_takes_one_picture(
    capfdbinary: pytest.CaptureFixture[bytes], model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["generate", "x", "--seed", "7", "--steps", "1", "--model", model, "-o", "-"]
    assert run_forked_command(command) == 0
    out, err = capfdbinary.readouterr()
    Path("piped.png").write_bytes(out)
    assert read_metadata("piped.png")[0].seed == 7
    assert err.decode().splitlines()[-1] == "seed 7"


def test_a_reader_that_goes_away_leaves_no_traceback(run: Run, capfd: pytest.CaptureFixture[str], model: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    for output, status in (([], 0), (["-o", "-"], 1)):  # a file is written whoever reads; a stream is not
        command = ["generate", "x", "--seed", "7", "--steps", "1", "--model", model, *output]
        assert run_forked_command(command, stdout=writer) == status
        assert "Traceback" not in capfd.readouterr().err
    os.close(writer)


def test_explain_prints_the_plan_and_makes_nothing(run: Run, tmp_path: Path) -> None:
    done = run("--explain")
    assert done.stdout.startswith("StableDiffusionPipeline on cpu:0: CPU")
    assert "noise" in done.stdout
    plan = json.loads(run("--explain", "--json").stdout)
    assert {"name", "value", "reason"} == set(plan["decisions"][0])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        ([], "nothing says what the picture is to show", 'anyaccel generate "a red apple"'),
        (["x", "--size", "0"], "width must be an integer from 1 to 16384 pixels, not 0", "512x768"),
        (["x", "--size", "17"], "height must be a multiple of 2 for this model, not 17", "use 16 or 18"),
        (["x", "--size", "1000000000"], "width must be an integer from 1 to 16384 pixels", "512x768"),
        (["x", "--size", "0x0"], "width must be an integer from 1 to 16384 pixels, not 0", "512x768"),
        (["x", "--size", "abc"], "invalid image size 'abc'", "512x768"),
        (["x", "--size", "17x16"], "width must be a multiple of 2 for this model, not 17", "use 16 or 18"),
        (["x", "--size", "100000x64"], "width must be an integer from 1 to 16384 pixels", "512x768"),
        (["x", "--guidance", "nan"], "guidance is a number, not nan", "--guidance 5"),
        (["x", "--guidance", "inf"], "guidance is a number, not inf", "--guidance 5"),
        (["x", "--model", ""], "the model has no name", "embedded"),
        (["x", "--steps", "0"], "an integer of at least 1, not 0", "--steps 20"),
        (["x", "-n", "0"], "at least one picture is made of each prompt, not 0", "-n 1"),
        (["x", "--seed", "-1"], "a seed must be an integer from 0 to 2**64 - 1, not -1", "without --seed one is drawn"),
        (["x", "--seed", str(2**64)], "a seed must be an integer", "--seed 7"),
        (["--prompts", "missing.txt"], "missing.txt cannot be read", "a prompt a line"),
        (["--prompts", "empty.txt"], "empty.txt has no prompt", "a prompt a line"),
        (["--prompts", "latin.txt"], "line 2 of latin.txt is not UTF-8", "save the file as UTF-8"),
        (["x", "-o", "a.bmp"], "not .bmp", ".png"),
        (["x", "-o", "empty.txt/a.png"], "cannot be a file", "-o"),
        (["x", "-o", "taken.png"], "taken.png is there already", "--force"),
        (["x", "-n", "2", "-o", "some.png"], "some-2.png is there already", "--force"),
        (["x", "--grid", "-o", "sheet.png"], "sheet-grid.png is there already", "--force"),
        (["x", "y", "-o", "-"], "2 pictures do not fit into one stream", "--grid"),
        (["x", "-o", "-", "--json"], "both want stdout", "-o picture.png"),
        (["x", "--model", "."], "is not a pipeline", "save_pretrained"),
        (["x", "--model", "./nowhere"], "does not exist", "path"),
        (["x", "--device", "nueron"], "unknown device 'nueron'", "did you mean neuron?"),
        (["x", "--dtype", "int8"], "a floating type", "float32"),
        (["--from", "taken.png"], "taken.png is no whole picture", "anyaccel wrote"),
        (["--from", "taken.png", "x"], "another prompt is given", "leave one of the two out"),
        (["x", "--show", "sixle"], "cannot be shown by 'sixle'", "did you mean sixel?"),
    ],
)
def test_a_wrong_call_ends_with_two_and_a_hint(
    run: Run, tmp_path: Path, arguments: list[str], message: str, hint: str
) -> None:
    for name in ("empty.txt", "taken.png", "some-2.png", "sheet-grid.png"):
        (tmp_path / name).touch()
    (tmp_path / "latin.txt").write_bytes("apple\ngrün\n".encode("latin-1"))
    done = run(*arguments)
    assert done.status == 2, done.stderr
    assert message in done.stderr
    assert hint in done.stderr.partition("hint:")[2]
    assert done.stdout == ""
    assert len(list(tmp_path.iterdir())) == 5


def test_a_device_that_is_not_here_ends_with_one(run: Run) -> None:
    done = run("x", "--device", "mlu")
    assert done.status == 1
    assert "mlu is not available" in done.stderr


def test_a_name_that_is_taken_meanwhile_is_left_alone_and_the_picture_is_kept(run: Run, model: str) -> None:
    work = GenerateRun(Options(prompts=["x"], model=model, seed=7, steps=1, output="a.png"))

    def write_first(done: int, total: int | None) -> None:
        Path("a.png").write_bytes(b"another's")

    work.on_step = write_first  # type: ignore[method-assign]
    with pytest.raises(UsageError, match=r"which is in a-2\.png"):
        work.run()
    assert Path("a.png").read_bytes() == b"another's"
    assert read_metadata("a-2.png")[0].seed == 7


def test_help_and_a_wrong_call_import_no_torch() -> None:
    code = (
        "import sys\nfrom anyaccel.cli.main import main\n"
        "sys.argv = ['anyaccel', 'generate', *sys.argv[1:]]\n"
        "try:\n    main()\n"
        "except SystemExit:\n    print(sorted({'torch', 'diffusers', 'numpy', 'PIL'} & set(sys.modules)))"
    )
    for arguments in (["--help"], ["x", "--size", "0"], ["x", "-o", "a.bmp"], ["x", "--model", "/nowhere/at/all"]):
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[-1] == "[]", done.stderr


# On a terminal.


@pytest.fixture
def command(model: str, run: Run) -> list[str]:
    run("warm", "--steps", "1", "-o", "warm.png")  # what is loaded here is loaded in a fork of it
    return ["generate", "a red apple", "--model", model, "--seed", "7"]


def test_a_terminal_shows_bars_and_the_picture(command: list[str]) -> None:
    screen = run_on_terminal([*command, "b", "--steps", "3"], environment={"COLORTERM": "truecolor"})
    assert screen.status == 0, screen.text
    assert "a-red-apple-7.png  seed 7" in screen.text
    assert re.search("picture 1 of 2 .* 3/3", screen.text)
    assert "picture 2 of 2" in screen.text
    assert screen.text.count("▀") == 2 * 64 * 32
    assert b"\x1b[38;2;" in screen.output


@pytest.mark.parametrize(
    ("environment", "answer", "mark"),
    [
        ({"TERM": "xterm-kitty"}, b"", b"\x1b_Gf=100,a=T"),
        ({"TERM_PROGRAM": "iTerm.app"}, b"", b"\x1b]1337;File=inline=1"),
        ({}, b"\x1b[?62;4;22c", b"\x1bPq"),
        ({}, b"\x1b[?62;22c", b"\x1b[38;5;"),
    ],
)
def test_the_terminals_own_way_is_taken(
    command: list[str], environment: dict[str, str], answer: bytes, mark: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    if answer:
        monkeypatch.setattr("anyaccel.cli.terminal_image._QUERY_TIMEOUT_S", 30.0)  # it answers, however late
    screen = run_on_terminal([*command, "--steps", "1"], environment=environment, answer=answer)
    assert screen.status == 0, screen.text
    assert mark in screen.output
    assert ("▀" in screen.text) == (b"38;5" in mark)


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_a_terminal_that_wants_no_colours_gets_none(command: list[str], environment: dict[str, str]) -> None:
    screen = run_on_terminal([*command, "--steps", "1"], environment=environment)
    assert "a-red-apple-7.png  seed 7" in screen.text
    assert "▀" not in screen.text
    assert re.search(rb"\x1b\[[0-9;]*[34]8;", screen.output) is None
    if "TERM" in environment:
        assert b"\x1b" not in screen.output


def test_a_narrow_terminal(command: list[str]) -> None:
    screen = run_on_terminal([*command, "--steps", "1"], columns=10, lines=6)
    assert screen.status == 0
    assert "▀" * 8 in screen.text
    assert "a-red-apple-7.png" in screen.text.replace("\r\n", "")


def test_a_terminal_gets_no_bytes_of_a_picture(command: list[str]) -> None:
    screen = run_on_terminal([*command, "-o", "-"])
    assert screen.status == 2
    assert "a picture is no text for a terminal" in screen.text


def test_ctrl_c_stops_at_the_next_step_and_keeps_what_is_done(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = GenerateRun.on_step

    def on_step(work: GenerateRun, *args: Any, **kwargs: Any) -> Any:
        while len(work.made) == 1 and not work.interruption.asked:  # the second picture lasts until the key is pressed
            time.sleep(0.01)
        return plain(work, *args, **kwargs)

    monkeypatch.setattr(GenerateRun, "on_step", on_step)
    screen = run_on_terminal(
        [*command, "b", "c", "--steps", "60", "--show", "never"], press=(b"picture 2 of 3", CTRL_C)
    )
    assert screen.status == 130
    assert "interrupted: 1 of 3 pictures were made" in screen.text
    assert "Traceback" not in screen.text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a-red-apple-7.png", "warm.png"]


def test_ctrl_c_before_the_first_step_stops_at_once(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GenerateRun, "_load", lambda work, job: time.sleep(60))
    screen = run_on_terminal(command, press=(b"starting", CTRL_C))
    assert screen.status == 130
    assert "interrupted" in screen.text
    assert "Traceback" not in screen.text


def test_the_end_that_another_process_asks_for_waits_for_no_step(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()

    def on_step(work: GenerateRun, *args: Any, **kwargs: Any) -> None:
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
def test_a_second_ctrl_c_waits_for_no_step_and_for_no_more_than_a_file(tmp_path: Path) -> None:
    heard: list[str] = []
    interruption = Interruption(on_wait=lambda: heard.append("wait"), on_end=lambda: (tmp_path / "ended").touch())

    def press_twice() -> None:
        with interruption.handling(), interruption.at_steps():
            os.kill(os.getpid(), signal.SIGINT)
            assert heard == ["wait"]
            os.kill(os.getpid(), signal.SIGINT)

    def end_while_a_file_is_written() -> None:
        with interruption.handling(), interruption.after_file():
            os.kill(os.getpid(), signal.SIGTERM)
            (tmp_path / "whole").touch()

    assert in_fork(press_twice) == 130
    assert (tmp_path / "ended").exists()
    assert in_fork(end_while_a_file_is_written) == 128 + signal.SIGTERM
    assert (tmp_path / "whole").exists()

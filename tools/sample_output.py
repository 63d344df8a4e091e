"""Run the code blocks of the documentation and write their output into the pages.

    .venv/bin/python -m tools.sample_output              # rewrite every block that differs
    .venv/bin/python -m tools.sample_output docs/run.md  # only on these pages

A marker is an HTML comment on the line before a fence:

    <!-- output -->          before ```console: run each line that starts with `$ anyaccel` or `$ python FILE`, and
                             write what it prints to stdout
    <!-- output -->          before ```text: write the output of the ```python block above
    <!-- output: only a b -->  the same, but keep only the lines that start with the word `a` or `b`, and their indented
                               continuation lines; `…` replaces the others
    <!-- output: first 3 -->   the same, but keep only the first three lines
    <!-- output: stderr -->    the same, but write what the command prints to stderr
    <!-- run -->             before ```python: run it. On the pages in `RUN_ALL` every block runs without this marker
    <!-- run: 512 as 64 -->  the same, with one number replaced, because tiny models run with tiny images
    <!-- not run -->         before ```python: do not run it
    <!-- file: NAME -->      before any block: save it under that name, for the commands and blocks of the page
    <!-- virtual: NAME -->   anywhere on a page: run its ```python blocks with this virtual device

The blocks of a page share one process, one set of variables and one temporary folder. A Hub ID in `MODELS` is a folder
there with a tiny pipeline, so that the published code runs without a download. `tests/docs` runs the same code.
"""

from __future__ import annotations

import os
import platform
import re
import runpy
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import run_in_fork

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
# Pages on which every Python block runs.
RUN_ALL = ("getting-started/*.md", "guides/*.md")
# Columns of the recorded output.
WIDTH = 100
_LIMIT_S = 120
# Printed after each block to split the output of the shared process. ASCII record separator, which no output contains.
_SEPARATOR = "\x1e"
_FENCE = re.compile(
    r"(?:^<!-- *(?P<marker>[^\n]*?) *-->\n)?^```(?P<language>\w+)[^\n]*\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE
)
_SMALLER = re.compile(r"run: *(\d+) as (\d+)")
_VIRTUAL = re.compile(r"^<!-- *virtual: *(\S+) *-->$", re.MULTILINE)


def _save_recipe(name: str) -> Callable[[Path], None]:
    def save(folder: Path) -> None:
        from anyaccel.recipes import recipes

        recipes()[name].make().save_pretrained(folder)  # type: ignore[attr-defined]

    return save


def _save_controlnet(folder: Path) -> None:
    from anyaccel.recipes import recipes

    recipes()["controlnet"].make().controlnet.save_pretrained(folder)  # type: ignore[attr-defined]


def _save_lora(folder: Path) -> None:
    """Write an adapter of rank 2 for the tiny Stable Diffusion."""
    import torch
    from peft import LoraConfig
    from peft.utils import get_peft_model_state_dict

    from anyaccel.recipes import recipes

    pipe = recipes()["stable-diffusion"].make()
    unet = pipe.unet  # type: ignore[attr-defined]
    unet.add_adapter(LoraConfig(r=2, lora_alpha=2, target_modules=["to_q", "to_v"]))
    # The seed depends on the folder, so that two adapters on a page differ.
    generator = torch.Generator().manual_seed(len(str(folder)))
    for name, weight in unet.named_parameters():
        if "lora" in name:  # a new adapter has zero weights and would not change the image
            weight.data = torch.randn(weight.shape, generator=generator) * 0.3
    type(pipe).save_lora_weights(folder, unet_lora_layers=get_peft_model_state_dict(unet))


# Model names on the pages, and the function that writes a tiny version of the model into a folder.
MODELS: dict[str, Callable[[Path], None]] = {
    "stable-diffusion-v1-5/stable-diffusion-v1-5": _save_recipe("stable-diffusion"),
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": _save_recipe("wan"),
    "lllyasviel/control_v11p_sd15_canny": _save_controlnet,
    "my-lora": _save_lora,
    "other-lora": _save_lora,
}


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    language: str
    marker: str
    text: str
    span: tuple[int, int]
    """Start and end of the text in the page."""

    @property
    def is_sample(self) -> bool:
        """Whether the block shows output that this tool writes."""
        return self.marker.startswith("output")

    @property
    def code(self) -> str:
        """The text as it is executed."""
        number = _SMALLER.match(self.marker)
        return re.sub(rf"\b{number[1]}\b", number[2], self.text) if number else self.text

    @property
    def prefixes(self) -> tuple[str, ...]:
        """First words of the lines to keep, or `first` and a number; empty keeps all lines."""
        words = self.marker.removeprefix("output").lstrip(": ").removeprefix("stderr").lstrip()
        return tuple(words.removeprefix("only").split())

    @property
    def shows_stderr(self) -> bool:
        """Whether the block shows stderr instead of stdout."""
        return self.marker.startswith("output: stderr")


def list_pages() -> list[Path]:
    """Return the pages that have a block to run, in order."""
    return [page for page in sorted(DOCS.rglob("*.md")) if any(_needs_run(page, block) for block in read_blocks(page))]


def read_blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page."""
    return [
        Block(match["language"], match["marker"] or "", match["text"], match.span("text"))
        for match in _FENCE.finditer(page.read_text())
    ]


def _needs_run(page: Path, block: Block) -> bool:
    return block.is_sample or _runs(page, block)


def _runs(page: Path, block: Block) -> bool:
    """Return whether a block is Python code to run."""
    if block.language != "python" or block.marker.startswith(("not run", "file:")):
        return False
    return block.marker.startswith("run") or any(page.relative_to(DOCS).match(pattern) for pattern in RUN_ALL)


def run_page(page: Path) -> str:
    """Run the blocks of a page and return the page with their output."""
    text, blocks = page.read_text(), read_blocks(page)
    with tempfile.TemporaryDirectory() as folder:
        printed = _run_python(page, blocks, Path(folder) / "python")
        console = Path(folder) / "console"
        _save_files(blocks, console)
        _save_models("".join(block.text for block in blocks if block.marker.startswith("file:")), console)
        environment = _environment(Path(folder))
        outputs: list[tuple[Block, str]] = []
        for number, block in enumerate(blocks):
            if block.is_sample and block.language == "console":
                outputs.append((block, "".join(_run_commands(block, console, environment))))
            elif block.is_sample:
                above = max((index for index in printed if index < number), default=None)
                if above is None:
                    raise SystemExit(f"{page}: no Python block runs above the output")
                outputs.append((block, _select(_normalize(printed[above], console), block.prefixes)))
    # From the end, so that the spans of earlier blocks stay valid.
    for block, output in reversed(outputs):
        text = text[: block.span[0]] + output + text[block.span[1] :]
    return text


def _environment(folder: Path) -> dict[str, str]:
    return {"ANYACCEL_CACHE": str(folder / "cache"), "COLUMNS": str(WIDTH), "NO_COLOR": "1", "HF_HUB_OFFLINE": "1"}


def _save_files(blocks: list[Block], folder: Path) -> None:
    """Write the blocks with a `file:` marker into a folder."""
    folder.mkdir()
    for block in blocks:
        if block.marker.startswith("file:"):
            (folder / block.marker.removeprefix("file:").strip()).write_text(block.text)


def _save_models(code: str, folder: Path) -> None:
    """Write the tiny models that the code names, in a fork: torch's thread pools do not survive a later fork."""

    def work() -> None:
        for name, save in MODELS.items():
            if f'"{name}"' in code:
                save(folder / name)

    if any(f'"{name}"' in code for name in MODELS):
        done = run_in_fork(work, ["models"], _environment(folder.parent), _LIMIT_S)
        if done.returncode:
            raise SystemExit(f"the tiny models cannot be written\n{done.stderr}")


def _run_python(page: Path, blocks: list[Block], folder: Path) -> dict[int, str]:
    """Run the Python blocks of a page and return their outputs by position."""
    numbers = [number for number, block in enumerate(blocks) if _runs(page, block)]
    if not numbers:
        return {}
    _save_files(blocks, folder)
    _save_models("\n".join(blocks[number].text for number in numbers), folder)
    virtual = _VIRTUAL.search(page.read_text())

    def work() -> None:
        from anyaccel import virtual as activate

        os.chdir(folder)
        sys.path.insert(0, str(folder))
        variables: dict[str, object] = {"__name__": "__main__"}
        with activate(virtual[1]) if virtual else nullcontext():
            for number in numbers:
                line = page.read_text()[: blocks[number].span[0]].count("\n")
                # Blank lines first, so that a traceback shows the line numbers of the page.
                exec(compile("\n" * line + blocks[number].code, str(page), "exec"), variables)
                print(_SEPARATOR, end="", flush=True)

    completed = run_in_fork(work, [str(page)], _environment(folder.parent), _LIMIT_S)
    if completed.returncode:
        raise SystemExit(f"{page}: a Python block fails\n{completed.stdout}{completed.stderr}")
    return dict(zip(numbers, completed.stdout.split(_SEPARATOR), strict=False))


def _run_commands(block: Block, folder: Path, environment: dict[str, str]) -> Iterator[str]:
    """Run each command of a console block, and yield its line and its output."""
    from anyaccel.cli.main import main

    def run_anyaccel() -> None:
        os.chdir(folder)
        sys.path.insert(0, "")
        main()

    def run_script() -> None:
        os.chdir(folder)
        runpy.run_path(sys.argv[0], run_name="__main__")

    for line in block.text.splitlines():
        if not line.startswith("$ "):
            continue
        program, *arguments = shlex.split(line.removeprefix("$ "), comments=True)
        if program == "anyaccel":
            done = run_in_fork(run_anyaccel, ["anyaccel", *arguments], environment, _LIMIT_S)
        elif program == "python":
            done = run_in_fork(run_script, arguments, environment, _LIMIT_S)
        else:
            raise SystemExit(f"only anyaccel and python can be run, not {line!r}")
        # Progress goes to stderr: without the marker it is shown only if there is nothing else to show.
        output = done.stdout + (done.stderr if done.returncode and not done.stdout else "")
        if block.shows_stderr:
            output = done.stderr
        yield f"{line}\n{_select(_normalize(output, folder), block.prefixes)}"


def _select(text: str, prefixes: tuple[str, ...]) -> str:
    """Return the lines that start with one of the prefixes, with their continuation lines; all without prefixes.

    The prefixes `first` and `3` select the first three lines instead.
    """
    if not prefixes:
        return text
    if prefixes[0] == "first":
        return "".join(text.splitlines(keepends=True)[: int(prefixes[1])]) + "…\n"
    # Not followed by a word character: the prefix `mem` must not select `memory`.
    starts = {prefix: re.compile(rf" *{re.escape(prefix)}(?!\w)") for prefix in prefixes}
    unmatched = [prefix for prefix in prefixes if not any(map(starts[prefix].match, text.splitlines()))]
    if unmatched:
        raise SystemExit(f"no line of the output starts with {', '.join(unmatched)}:\n{text}")
    lines: list[str] = []
    depth: int | None = None
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip())
        if any(start.match(line) for start in starts.values()):
            depth = indent
        elif not (depth is not None and line.strip() and indent > depth):
            depth = None
        if depth is not None:
            lines.append(line)
        elif lines[-1:] != ["…"] and line.strip():
            lines.append("…")
    return "\n".join(lines) + "\n"


def _normalize(text: str, folder: Path) -> str:
    """Replace paths and versions of this machine, and remove trailing spaces."""
    import torch

    text = text.replace(f"{folder}/", "").replace(str(folder), ".").replace(torch.__version__, "2.13.0+cpu")
    text = text.replace(platform.python_version(), "3.12.4").replace(platform.machine(), "x86_64")
    return "".join(f"{line.rstrip()}\n" for line in text.rstrip().splitlines())


def import_libraries() -> None:
    """Import the libraries once, before the processes of the pages are forked."""
    import diffusers
    import transformers

    import anyaccel.runtime.pipeline  # noqa: F401

    # Without torchvision, transformers warns about slower image processors.
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    for name in ("StableDiffusionPipeline", "AutoencoderKL", "UNet2DConditionModel"):
        getattr(diffusers, name)


def main(arguments: list[str]) -> None:
    """Rewrite the given pages, or all pages."""
    import_libraries()
    for page in [Path(argument).resolve() for argument in arguments] or list_pages():
        old, new = page.read_text(), run_page(page)
        print(f"{page.relative_to(ROOT)}: {'unchanged' if new == old else 'rewritten'}", flush=True)
        page.write_text(new)


if __name__ == "__main__":
    main(sys.argv[1:])

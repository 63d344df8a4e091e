"""A run of `anyaccel generate`: loads the model, then generates and writes the images, videos or audio one by one."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import typer

from anyaccel.cli.generate.notes import find_notes
from anyaccel.cli.generate.options import Options
from anyaccel.cli.interrupts import INTERRUPTED, Interruption
from anyaccel.cli.progress import Display, shorten_start
from anyaccel.cli.terminal_media import show_media
from anyaccel.errors import ModelError, UsageError
from anyaccel.processes.gc_control import gc_paused
from anyaccel.progress import ProgressListener
from anyaccel.upstream.quick_imports import quick_imports

if TYPE_CHECKING:
    from pathlib import Path

    from anyaccel.cli.generate.generation_requests import GenerateTask
    from anyaccel.generation.media import GeneratedMedia
    from anyaccel.generation.media_format import EncodedFile
    from anyaccel.generation.model_loading import LoadedModel
    from anyaccel.generation.output_files import Destination
    from anyaccel.media.types import Kind

__all__ = ["GenerateRun"]


class GenerateRun(ProgressListener):
    """One run of the `anyaccel generate` command.

    torch is imported only after the options are validated, so usage errors appear immediately.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.display = Display()
        self.interruption = Interruption(on_wait=self.display.show_stopping, on_end=self.display.restore_cursor)
        self.destination: Destination | None = None
        """Destination of the files; None for stdout."""
        self.total = 0
        """Number of images, videos or audio files to generate."""
        self.kind: Kind = "image"
        """What the model generates, as far as it is known before the first result."""
        self.finished: list[tuple[Path | None, GeneratedMedia]] = []
        """Path and content of each finished file; the path is None for stdout."""
        self.sheet_path: Path | None = None
        self.notes: set[str] = set()
        """Notes that were printed."""
        self.name_conflict: UsageError | None = None
        """Raised at the end of the run if another process wrote one of the requested files."""

    def run(self) -> None:
        """Run the command and restore the terminal, even after an error."""
        try:
            with self.interruption.handling():
                self._run()
        except BaseException as error:
            if not self.interruption.requested:
                raise
            # Libraries may wrap KeyboardInterrupt in an error of their own, so any error after Ctrl-C counts as the
            # interruption. It is printed as a note, because it could be unrelated.
            progress = (
                f": {len(self.finished)} of {self.total} {self._plural()} were generated" if self.total > 1 else ""
            )
            self.display.print_line(f"interrupted{progress}")
            if not isinstance(error, KeyboardInterrupt):
                self.display.print_line(f"note: error during the interruption: {type(error).__name__}: {error}")
            raise typer.Exit(INTERRUPTED) from None
        finally:
            self.display.clear()
            # Also after an error or Ctrl-C: the finished images exist.
            if self.options.as_json and self.finished:
                _print_json([self._as_json(path, generated) for path, generated in self.finished])
        if self.name_conflict is not None:
            raise self.name_conflict

    def on_component(self, done: int, total: int, name: str) -> None:
        """Show the number of loaded components."""
        self.display.on_component(done, total, name)

    def on_layer(self, done: int, total: int, text: str) -> None:
        """Show the number of quantized layers."""
        self.display.on_layer(done, total, text)

    def on_step(self, done: int, total: int | None) -> None:
        """Show the number of finished steps; raise KeyboardInterrupt if the user pressed Ctrl-C."""
        self.display.on_step(done, total)
        self.interruption.check()

    def on_frame(self, done: int, total: int) -> None:
        """Show the number of encoded frames; raise KeyboardInterrupt if the user pressed Ctrl-C."""
        self.display.on_frame(done, total)
        self.interruption.check()

    def _plural(self, count: int = 2) -> str:
        noun = {"image": "image", "video": "video", "audio": "audio file"}[self.kind]
        return noun if count == 1 else f"{noun}s"

    def _run(self) -> None:
        options = self.options
        options.check()
        prompts, originals = options.read_prompts(), options.read_metadata()
        self.total = (len(prompts) + len(originals) or 1) * options.count
        if not options.explain:
            # Checking the destination creates a temporary file, which a signal must not leave behind.
            with self.interruption.after_file():
                self.destination = options.read_destination(self.total)
        if len(options.prompts) > 1 and not any(" " in prompt for prompt in options.prompts):
            quoted = " ".join(options.prompts)
            self.display.print_line(
                f'note: each word is a separate prompt ({self.total} results); quote them for one prompt: "{quoted}"'
            )
        self.display.start_phase("Starting")
        with gc_paused(), quick_imports():
            from anyaccel.cli.generate.generation_requests import make_tasks

            tasks = make_tasks(options, prompts, originals)
            if not options.explain:
                tasks = [self._check(task) for task in tasks]
        for task in tasks:
            loaded = self._load(task)
            if options.explain:
                self._print_plan(loaded)
                return
            for prompt, seed in task.request.images:
                self._generate(loaded, task, prompt, seed)
        if options.grid:
            with self.interruption.after_file():
                self._write_contact_sheet()

    def _check(self, task: GenerateTask) -> GenerateTask:
        """Return the task with its device opened.

        Raise an error if the pipeline cannot run the task, or if its result cannot be written.
        """
        from anyaccel.generation.media_format import check_output
        from anyaccel.generation.model_loading import open_requested_device
        from anyaccel.generation.request_check import check_request
        from anyaccel.media.formats import default_suffix

        task = replace(task, request=open_requested_device(task.request))
        interface = check_request(task.request)
        if interface is None or interface.kind is None:
            return task  # known only after loading
        self.kind = interface.kind
        if self.options.grid and self.kind == "audio":
            raise UsageError(f"{interface.name} generates audio, which has no contact sheet", hint="omit --grid")
        if self.destination is None:
            check_output(interface, default_suffix(self.kind), task.request.call, None, self.total)
        else:
            suffix = self.destination.choose_suffix(self.kind)
            check_output(interface, suffix, task.request.call, self.destination.folder, self.total)
        return task

    def _load(self, task: GenerateTask) -> LoadedModel:
        with gc_paused(), quick_imports():
            from anyaccel.generation.model_loading import load_model

        model = task.request.model
        text = f"Loading {shorten_start(model.name)}"
        # huggingface_hub shows its own progress bars for downloads, which a second bar would overwrite.
        self.display.print_line(text) if model.kind == "hub" else self.display.start_phase(text)
        try:
            loaded = load_model(task.request, self)
        except ModelError as error:
            if task.original is None:
                raise
            raise ModelError(
                f"the {task.original.kind} was generated with {task.original.model}, which cannot be loaded: "
                f"{error.message}",
                hint=f"pass the Hub ID or folder of this model with --model; {error.hint}",
            ) from error
        if loaded.load_s:
            self._print_placement(loaded)
        if task.original is not None:
            self._warn_about_differences(loaded, task)
        return loaded

    def _print_placement(self, loaded: LoadedModel) -> None:
        """Print the model, the device and the dtype, followed by notes, for example about a slow dtype."""
        plan, dtype = loaded.pipe.plan, loaded.pipe.plan.dtype.value
        virtual = " (virtual device; timings do not apply to hardware)" if plan.virtual else ""
        formats = " and ".join(dict.fromkeys(form for _, form in plan.weights.value))
        precision = f"{dtype}, weights in {formats}" if formats else dtype
        self.display.print_line(f"{loaded.model.name} on {plan.device} in {precision}{virtual}")
        if plan.virtual and self.options.dtype is None and self.options.source is None:
            self.display.print_line(f"note: {dtype}: {plan.dtype.reason}; use --dtype to choose another dtype")
        for note in find_notes(loaded, self.options.read_call(), self.options.read_prompts()):
            self.display.print_line(f"note: {note}")

    def _warn_about_differences(self, loaded: LoadedModel, task: GenerateTask) -> None:
        from anyaccel.generation.media import expected_metadata
        from anyaccel.generation.metadata import find_differences

        assert task.original is not None
        current = expected_metadata(loaded, *task.request.images[0], task.request.call)
        for difference in find_differences(task.original, current):
            self.display.print_line(f"warning: {difference}; the {task.original.kind} may differ")

    def _print_plan(self, loaded: LoadedModel) -> None:
        self.display.clear()
        plan = loaded.pipe.plan
        _print_json(plan.to_dict()) if self.options.as_json else print(plan)

    def _generate(self, loaded: LoadedModel, task: GenerateTask, prompt: str | None, seed: int) -> None:
        """Generate one image, video or audio and write it."""
        from anyaccel.generation.media import generate_one

        index = len(self.finished)
        number = f" {index + 1} of {self.total}" if self.total > 1 else ""
        self.display.start_phase(f"Generating {self.kind}{number}")
        with self.interruption.at_steps():
            generated = generate_one(loaded, prompt, seed, task.request.call, self)
            self.display.clear()
            self.kind = generated.metadata.kind  # type: ignore[assignment]
            if self.kind == "video":
                self.display.start_phase(f"Encoding video{number}")
            encoded = self._encode(generated)
        self.display.clear()
        if generated.note and generated.note not in self.notes:
            self.notes.add(generated.note)
            self.display.print_line(f"note: {generated.note}")
        # Signals wait until the image is in `finished`, so the final count includes every written file.
        with self.interruption.after_file():
            path = self._write(generated, encoded, index)
            self.finished.append((path, generated))
            if path is None:
                self.display.print_line(f"seed {seed}")
            elif not self.options.as_json:
                show_media(generated.media, sys.stdout, self.options.show)
                _print_result(f"{path}  seed {seed}")

    def _encode(self, generated: GeneratedMedia) -> EncodedFile | None:
        """Return the file of a result, or None if only the contact sheet is written to stdout."""
        from anyaccel.generation.media_format import encode_media
        from anyaccel.media.formats import default_suffix

        if self.destination is None:
            if self.options.grid:
                return None
            suffix = default_suffix(self.kind)
        else:
            suffix = self.destination.choose_suffix(self.kind)
        return encode_media(generated.media, suffix, [generated.metadata], on_frame=self.on_frame)

    def _write(self, generated: GeneratedMedia, encoded: EncodedFile | None, index: int) -> Path | None:
        """Write a result and return its path, or None if it is written to stdout."""
        metadata = generated.metadata
        if self.destination is None or encoded is None:
            if encoded is not None:
                _write_to_stdout(encoded.content)
            return None
        path = self.destination.path_of(index, metadata.prompt, metadata.seed, self.kind)
        return self._save(self.destination, path, encoded.content, encoded.sidecar)

    def _write_contact_sheet(self) -> None:
        from anyaccel.generation.contact_sheets import make_sheet
        from anyaccel.generation.image_format import encode_image

        metadata = [generated.metadata for _, generated in self.finished]
        # With several images per prompt, one row per prompt.
        several = len({item.prompt for item in metadata}) > 1 and self.options.count > 1
        columns = self.options.count if several else None
        sheet = make_sheet([generated.media for _, generated in self.finished], columns)
        if self.destination is None:
            _write_to_stdout(encode_image(sheet, ".png", metadata))
            return
        path = self.destination.sheet_path(metadata[0].prompt, metadata[0].seed, self.kind)
        self.sheet_path = self._save(self.destination, path, encode_image(sheet, path.suffix, metadata))
        if not self.options.as_json:
            _print_result(f"{self.sheet_path}  {len(metadata)} {self._plural(len(metadata))}")

    def _save(self, destination: Destination, path: Path, content: bytes, sidecar: bytes | None = None) -> Path:
        """Write a file and return its path; if the file already exists, write to an unused name.

        The name conflict is recorded and raised as an error at the end of the run.
        """
        from anyaccel.generation.output_files import write_unique

        try:
            return destination.write(path, content, sidecar)
        except FileExistsError:
            saved = write_unique(path, content, sidecar)
            self.name_conflict = UsageError(
                f"{path} was created by another process during the run; the {self.kind} was saved to {saved}",
                hint="use --force to overwrite existing files",
            )
            return saved

    def _as_json(self, path: Path | None, generated: GeneratedMedia) -> dict[str, Any]:
        record = asdict(generated.metadata)
        del record["scheduler_config"]  # long, and the file contains it
        sheet = {"grid": str(self.sheet_path)} if self.sheet_path else {}
        return {"path": str(path), **record, "seconds": round(generated.seconds, 3), **sheet}


def _print_result(line: str) -> None:
    """Print a line to stdout; ignore the error if the reader has closed the pipe."""
    try:
        print(line, flush=True)
    except BrokenPipeError:
        # Python flushes stdout once more at exit, which would raise again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_json(document: object) -> None:
    print(json.dumps(document, indent=2))


def _write_to_stdout(content: bytes) -> None:
    sys.stdout.buffer.write(content)
    sys.stdout.buffer.flush()

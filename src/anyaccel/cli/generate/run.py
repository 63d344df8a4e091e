"""One run of `anyaccel generate`: load, make picture after picture, write each as it is done, and say so."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from anyaccel.cli.generate.options import Options
from anyaccel.cli.generate.warnings import find_notes
from anyaccel.cli.interrupts import INTERRUPTED, Interruption
from anyaccel.cli.progress import Display
from anyaccel.cli.terminal_image import show_image
from anyaccel.errors import ModelError, UsageError
from anyaccel.processes.gc_control import gc_paused
from anyaccel.progress import ProgressListener

if TYPE_CHECKING:
    from pathlib import Path

    from anyaccel.cli.generate.requests import GenerateTask
    from anyaccel.generation.image import GeneratedImage
    from anyaccel.generation.model_cache import LoadedModel
    from anyaccel.generation.output_files import Destination

__all__ = ["GenerateRun"]


class GenerateRun(ProgressListener):
    """Carries the options out. It imports torch as late as it can: what is wrong with them is said at once."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.display = Display()
        self.interruption = Interruption(on_wait=self.display.warn_of_end, on_end=self.display.abandon)
        self.destination: Destination | None = None
        """None is stdout."""
        self.total = 0
        self.made: list[tuple[Path | None, GeneratedImage]] = []
        self.sheet_path: Path | None = None
        self.refused: UsageError | None = None

    def run(self) -> None:
        """Do it, and leave the terminal as it was whatever happens."""
        try:
            with self.interruption.handling():
                self._run()
        except BaseException as error:
            if not self.interruption.asked:
                raise
            # A library may turn the interruption into an error of its own; one that is another's is told all the same.
            made = f": {len(self.made)} of {self.total} pictures were made" if self.total > 1 else ""
            self.display.say(f"interrupted{made}")
            if not isinstance(error, KeyboardInterrupt):
                self.display.say(f"note: at that moment {type(error).__name__}: {error}")
            raise typer.Exit(INTERRUPTED) from None
        finally:
            self.display.clear()
            if self.options.as_json and self.made:
                _print_json([self._as_json(path, picture) for path, picture in self.made])
        if self.refused is not None:
            raise self.refused

    def on_component(self, done: int, total: int, name: str) -> None:
        """The runtime loads a component."""
        self.display.on_component(done, total, name)

    def on_step(self, done: int, total: int | None) -> None:
        """The runtime has done a step."""
        self.display.on_step(done, total)
        self.interruption.check()

    def _run(self) -> None:
        options = self.options
        options.check()
        prompts, origins = options.read_prompts(), options.read_metadata()
        self.total = (len(prompts) + len(origins)) * options.count
        if not options.explain:
            with self.interruption.after_file():
                self.destination = options.read_destination(self.total)
        if len(options.prompts) > 1 and not any(" " in prompt for prompt in options.prompts):
            quoted = " ".join(options.prompts)
            self.display.say(
                f'note: this makes {self.total} pictures; for one of several words, quote them: "{quoted}"'
            )
        self.display.begin("starting")
        with gc_paused():
            from anyaccel.cli.generate.requests import make_jobs

            jobs = make_jobs(options, prompts, origins)
        for job in jobs:
            loaded = self._load(job)
            if options.explain:
                self._explain(loaded)
                return
            for prompt, seed in job.order.pictures:
                self._make(loaded, job, prompt, seed)
        if options.grid:
            with self.interruption.after_file():
                self._write_sheet()

    def _load(self, job: GenerateTask) -> LoadedModel:
        with gc_paused():
            from anyaccel.generation.model_cache import load_model

        model = job.order.model
        words = f"loading {model.name}"
        # The hub shows its own bars for what it downloads, and ours would be in their way.
        self.display.say(words) if model.kind == "hub" else self.display.begin(words)
        try:
            loaded = load_model(job.order, self)
        except ModelError as error:
            if job.then is None:
                raise
            raise ModelError(
                f"the picture was made with {job.then.model}, which cannot be loaded: {error.message}",
                hint=f"--model says where it is now; {error.hint}",
            ) from error
        if loaded.load_s:
            self._introduce(loaded)
        if job.then is not None:
            self._warn_of_differences(loaded, job)
        return loaded

    def _introduce(self, loaded: LoadedModel) -> None:
        """Say what is used, that a virtual device is one, and what the user may not expect of it."""
        plan, dtype = loaded.pipe.plan, loaded.pipe.plan.dtype.value
        virtual = ", virtual: nothing here is about hardware" if plan.virtual else ""
        self.display.say(f"{loaded.model.name} on {plan.device} in {dtype}{virtual}")
        if plan.virtual and self.options.dtype is None and self.options.source is None:
            self.display.say(f"note: {dtype}: {plan.dtype.reason}; --dtype chooses another")
        for note in find_notes(loaded, self.options.read_call(), self.options.read_prompts()):
            self.display.say(f"note: {note}")

    def _warn_of_differences(self, loaded: LoadedModel, job: GenerateTask) -> None:
        from anyaccel.generation.image import expected_metadata
        from anyaccel.generation.metadata import find_differences

        assert job.then is not None
        now = expected_metadata(loaded, *job.order.pictures[0], job.order.call)
        for difference in find_differences(job.then, now):
            self.display.say(f"warning: {difference}: the picture may not be the same")

    def _explain(self, loaded: LoadedModel) -> None:
        self.display.clear()
        plan = loaded.pipe.plan
        _print_json(plan.to_dict()) if self.options.as_json else print(plan)

    def _make(self, loaded: LoadedModel, job: GenerateTask, prompt: str, seed: int) -> None:
        from anyaccel.generation.image import generate_image

        place = len(self.made)
        self.display.begin(f"picture {place + 1} of {self.total}" if self.total > 1 else "picture")
        with self.interruption.at_steps():
            picture = generate_image(loaded, prompt, seed, job.order.call, self)
        self.display.clear()
        with self.interruption.after_file():
            path = self._write(picture, place)
            self.made.append((path, picture))
            if path is None:
                self.display.say(f"seed {seed}")
            elif not self.options.as_json:
                show_image(picture.image, sys.stdout, self.options.show)
                _tell(f"{path}  seed {seed}")

    def _write(self, picture: GeneratedImage, place: int) -> Path | None:
        from anyaccel.generation.image_format import encode_image

        origin = picture.origin
        if self.destination is None:
            if not self.options.grid:
                _write_to_stdout(encode_image(picture.image, ".png", [origin]))
            return None
        content = encode_image(picture.image, self.destination.suffix, [origin])
        return self._save(self.destination, self.destination.path_of(place, origin.prompt, origin.seed), content)

    def _write_sheet(self) -> None:
        from anyaccel.generation.contact_sheet import make_contact_sheet
        from anyaccel.generation.image_format import encode_image

        origins = [picture.origin for _, picture in self.made]
        several = len({origin.prompt for origin in origins}) > 1 and self.options.count > 1
        columns = self.options.count if several else None  # a row a prompt
        sheet = make_contact_sheet([picture.image for _, picture in self.made], columns)
        if self.destination is None:
            _write_to_stdout(encode_image(sheet, ".png", origins))
            return
        content = encode_image(sheet, self.destination.suffix, origins)
        path = self.destination.sheet_path(origins[0].prompt, origins[0].seed)
        self.sheet_path = self._save(self.destination, path, content)
        if not self.options.as_json:
            _tell(f"{self.sheet_path}  {len(origins)} pictures")

    def _save(self, destination: Destination, path: Path, content: bytes) -> Path:
        """Write a file; a name that was taken meanwhile is left alone, and the picture is not lost for it."""
        from anyaccel.generation.output_files import write_free

        try:
            return destination.write(path, content)
        except FileExistsError:
            kept = write_free(path, content)
            self.refused = UsageError(
                f"{path} was written by another while the picture was made, which is in {kept}",
                hint="--force writes over what is there",
            )
            return kept

    def _as_json(self, path: Path | None, picture: GeneratedImage) -> dict[str, Any]:
        record = asdict(picture.origin)
        del record["scheduler_config"]
        sheet = {"grid": str(self.sheet_path)} if self.sheet_path else {}
        return {"path": str(path), **record, "seconds": round(picture.seconds, 3), **sheet}


def _tell(line: str) -> None:
    """A line for whoever reads stdout; that nobody does any more is no reason to stop."""
    try:
        print(line, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_json(document: object) -> None:
    print(json.dumps(document, indent=2))


def _write_to_stdout(content: bytes) -> None:
    sys.stdout.buffer.write(content)
    sys.stdout.buffer.flush()

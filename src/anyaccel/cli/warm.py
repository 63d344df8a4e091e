"""`anyaccel warm`: compile a model ahead of time, so that the first picture comes as soon as the later ones."""

from __future__ import annotations

import time
from collections import Counter
from typing import Annotated

import typer

from anyaccel.call_limits import parse_image_size
from anyaccel.cli.cache import refuse_unwritable
from anyaccel.cli.interrupts import cleanup_on_exit
from anyaccel.cli.progress import Display
from anyaccel.errors import UsageError
from anyaccel.progress import ProgressListener
from anyaccel.runtime.speed.compile_cache import find_folder

__all__ = ["warm_model"]


class _Loading(ProgressListener):
    """Tells the terminal what is loaded."""

    def __init__(self, display: Display, model: str) -> None:
        self.display, self.model = display, model

    def on_component(self, done: int, total: int, name: str) -> None:
        """One more is loaded."""
        self.display.begin(f"loading {self.model}: {name}, {done + 1} of {total}" if name else f"placing {self.model}")


def warm_model(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A hub id, a folder, or `embedded`.")],
    sizes: Annotated[
        list[str] | None, typer.Option("--size", metavar="WxH", help="A size to compile for; may be given again.")
    ] = None,
    device: Annotated[str, typer.Option("--device", "-d", help="What to compile for; it must be here.")] = "auto",
    images: Annotated[int, typer.Option("--images", "-n", help="How many images a call makes.")] = 1,
    dtype: Annotated[str | None, typer.Option("--dtype", help="The type to run in; else the device's best.")] = None,
    pictures: Annotated[int, typer.Option("--pictures", help="How many pictures are to come.")] = 1000,
) -> None:
    """Compile a model for some sizes, and keep the result for every later process: see `anyaccel cache`."""
    if images < 1 or pictures < 1:
        raise UsageError("images and pictures are numbers from 1 up", hint="leave them out")
    shapes = list(dict.fromkeys(parse_image_size(size) for size in sizes or []))
    refuse_unwritable(find_folder())
    with cleanup_on_exit() as display:
        display.begin(f"loading {model}")
        from anyaccel.errors import NotMeasurableError
        from anyaccel.generation.model_name import resolve_model
        from anyaccel.generation.progress import counting_components
        from anyaccel.runtime.pipeline import DiffusionPipeline
        from anyaccel.runtime.placement_state import find_placement

        with counting_components(_Loading(display, model)):
            pipe = DiffusionPipeline.from_pretrained(resolve_model(model).source)
        pipe.to(device, compile=True, expected_images=pictures, **({"dtype": dtype} if dtype else {}))
        pipe.set_progress_bar_config(disable=True)
        compiling = pipe.plan.compile_policy
        if compiling.value.when == "never":
            raise NotMeasurableError(
                f"nothing is compiled on {pipe.plan.title}: {compiling.reason}", hint="no need to warm it"
            )
        calls = [{"width": width, "height": height} for width, height in shapes] or [{}]
        start = time.perf_counter()
        for number, call in enumerate(calls):
            left = compiling.value.takes_s * (len(calls) - number)
            size = f"{call['width']} × {call['height']}" if call else "the model's own size"
            display.begin(f"compiling for {size}, {number + 1} of {len(calls)}; about {left:.0f} s left")
            pipe.warmup([{**call, **({"num_images_per_prompt": images} if images > 1 else {})}])
    placement = find_placement(pipe)
    outcomes = placement.speed.cache_outcomes if placement and placement.speed else Counter[str]()
    counted = "1 size" if len(calls) == 1 else f"{len(calls)} sizes"
    print(f"{counted} ready in {time.perf_counter() - start:.0f} s: {_tell(outcomes)}")
    if outcomes["not written"]:
        refuse_unwritable(find_folder())


def _tell(outcomes: Counter[str]) -> str:
    """What became of what was compiled: `1 new, 0 kept before`."""
    words = f"{outcomes['written']} new, {outcomes['loaded']} kept before"
    if outcomes["not handed out"]:
        words += f", {outcomes['not handed out']} that cannot be kept: its compiler hands nothing out through torch"
    if outcomes["not written"]:
        words += f", {outcomes['not written']} that could not be written"
    return words if outcomes.total() else "nothing was compiled"

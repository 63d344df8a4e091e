"""`anyaccel warm`: compiles a model ahead of time, so the first image is as fast as later ones."""

from __future__ import annotations

import time
from collections import Counter
from typing import Annotated

import typer

from anyaccel.call_limits import parse_image_size
from anyaccel.cli.cache import check_cache_writable
from anyaccel.cli.completion import complete_device
from anyaccel.cli.interrupts import cleanup_on_exit
from anyaccel.cli.progress import Display, shorten_start
from anyaccel.cli.shared_options import Dtype
from anyaccel.errors import UsageError
from anyaccel.progress import ProgressListener
from anyaccel.runtime.speed.compile_cache import find_entries_dir

__all__ = ["warm_model"]


class _LoadingProgress(ProgressListener):
    """Progress display for loading a model."""

    def __init__(self, display: Display, model: str) -> None:
        self.display, self.model = display, model

    def on_component(self, done: int, total: int, name: str) -> None:
        """Show the name of the component that is being loaded."""
        model = shorten_start(self.model)
        self.display.start_phase(
            f"Loading {model}: {name}, component {done + 1} of {total}" if name else f"Placing {model}"
        )


Sizes = Annotated[
    list[str] | None,
    typer.Option(
        "--size", metavar="WxH", help="Image size to compile for; repeat for several. Default: set by the model."
    ),
]
ExpectedImages = Annotated[
    int, typer.Option("--expected-images", help="Expected number of images; affects how much is compiled.")
]


def warm_model(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Hub ID, folder or `embedded`.")],
    sizes: Sizes = None,
    device: Annotated[
        str,
        typer.Option(
            "--device", "-d", help="Device to compile for; it must be available.", autocompletion=complete_device
        ),
    ] = "auto",
    images: Annotated[int, typer.Option("--images", "-n", help="Number of images per call.")] = 1,
    dtype: Dtype = None,
    expected_images: ExpectedImages = 1000,
) -> None:
    """Compile a model ahead of time and cache the result.

    Every later process loads the compiled graphs from the cache; see `anyaccel cache`.
    """
    for option, value in (("--images", images), ("--expected-images", expected_images)):
        if value < 1:
            raise UsageError(f"{option} must be at least 1, not {value}", hint=f"omit {option} to use the default")
    shapes = list(dict.fromkeys(parse_image_size(size) for size in sizes or []))
    # Checked first: compiling can take many minutes, and its result would be lost.
    check_cache_writable(find_entries_dir())
    with cleanup_on_exit() as display:
        display.start_phase(f"Loading {shorten_start(model)}")
        # Imported after the phase is shown, because diffusers takes seconds to import.
        from anyaccel.errors import NotMeasurableError
        from anyaccel.generation.model_name import resolve_model
        from anyaccel.generation.progress import counting_components
        from anyaccel.runtime.pipeline import DiffusionPipeline
        from anyaccel.runtime.placement_state import find_placement
        from anyaccel.upstream.modular_blocks import disable_progress_bars

        with counting_components(_LoadingProgress(display, model)):
            pipe = DiffusionPipeline.from_pretrained(resolve_model(model).source)
        pipe.to(device, compile=True, expected_images=expected_images, **({"dtype": dtype} if dtype else {}))
        disable_progress_bars(pipe)
        policy = pipe.plan.compile_policy
        if policy.value.when == "never":
            raise NotMeasurableError(
                f"anyaccel does not compile models on {pipe.plan.title}: {policy.reason}",
                hint="skip `anyaccel warm`: there is nothing to compile for this device",
            )
        calls = [{"width": width, "height": height} for width, height in shapes] or [{}]
        start = time.perf_counter()
        # One warmup call per size, so the display can show the remaining time.
        for index, call in enumerate(calls):
            seconds_left = policy.value.compile_s * (len(calls) - index)
            size = f"{call['width']} × {call['height']}" if call else "the model's size"
            display.start_phase(
                f"Compiling for {size}, size {index + 1} of {len(calls)}; about {seconds_left:.0f} s left"
            )
            pipe.warmup([{**call, **({"num_images_per_prompt": images} if images > 1 else {})}])
    placement = find_placement(pipe)
    outcomes = placement.speed.cache_outcomes if placement and placement.speed else Counter[str]()
    size_count = "1 size" if len(calls) == 1 else f"{len(calls)} sizes"
    print(f"{size_count} ready in {time.perf_counter() - start:.0f} s: {_summarize_outcomes(outcomes)}")
    if outcomes["not written"]:
        # The folder was writable at the start; raise with the reason why it no longer is.
        check_cache_writable(find_entries_dir())


def _summarize_outcomes(outcomes: Counter[str]) -> str:
    """Return a summary of the compile-cache outcomes, such as `1 compiled, 0 loaded from the cache`."""
    summary = f"{outcomes['written']} compiled, {outcomes['loaded']} loaded from the cache"
    if outcomes["not handed out"]:
        summary += f", {outcomes['not handed out']} not cacheable: the compiler does not export graphs through torch"
    if outcomes["not written"]:
        summary += f", {outcomes['not written']} could not be written to the cache"
    return summary if outcomes.total() else "nothing was compiled"

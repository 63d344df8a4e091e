"""Noise sources for the pipeline calls that one request is split into."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from anyaccel.errors import UsageError
from anyaccel.runtime.batch_split import find_split_obstacle, split_request
from anyaccel.runtime.call.batch_draws import (
    CannotSplitError,
    NothingToSplitError,
    TracedDraws,
    match_draws,
    trace_draws,
)
from anyaccel.runtime.call_request import CallRequest
from anyaccel.runtime.introspection import find_models, plain_class
from anyaccel.runtime.placement_state import find_options
from anyaccel.runtime.workarounds.noise import (
    SPLIT_HINT,
    BatchSliceNoise,
    NoiseSource,
    PerImageNoise,
    make_generators,
)
from anyaccel.upstream.diffusers_internals import has_custom_processors

__all__ = ["RequestNoise", "StartNoise"]

# Resets the generators, and returns a chunk with its generators, and its noise source.
StartNoise = Callable[[CallRequest], tuple[CallRequest, NoiseSource]]


class RequestNoise:
    """Noise sources for one request, and the states of its generators when the request started.

    If the request is split into several pipeline calls, each call, and each rerun of a call, draws the
    same noise that the unsplit call would draw.
    """

    def __init__(self, pipe: Any, request: CallRequest, traced: dict[str, TracedDraws]) -> None:
        self.pipe, self.request, self.traced = pipe, request, traced
        passed = request.arguments.get("generator")
        self.is_list = isinstance(passed, list | tuple)
        generators = list(passed) if isinstance(passed, list | tuple) else [] if passed is None else [passed]
        self.states = [(generator, generator.get_state()) for generator in generators]
        self.default_state = torch.default_generator.get_state()
        self.batch: TracedDraws | None = None
        self.chunks: dict[tuple[int, int], TracedDraws] = {}
        """Traced draws by number of prompts and images per prompt."""

    def rewind(self) -> None:
        """Reset all generators to their states at the start of the request."""
        self._reset(0, self.request.images)

    def split(self, images_per_call: int | None, first: int) -> list[CallRequest]:
        """Split the request into requests of at most `images_per_call` images, starting at image `first`.

        Raise `UsageError` if it is not known which part of the batch's noise each call needs.
        """
        latents = self.request.arguments.get("latents")
        if isinstance(latents, torch.Tensor) and latents.dim() and len(latents) != self.request.images:
            return [self.request]  # the pipeline rejects them
        chunks = split_request(self.request, images_per_call, first)
        obstacle = self._find_obstacle() if len(chunks) > 1 else ""
        if obstacle:
            raise UsageError(
                f"{self.request.images} images cannot be generated in {len(chunks)} calls: {obstacle}",
                hint="call the pipeline once per image, or pass images_per_call to pipe.to() to choose the batch size",
            )
        if self.request.seeds or (len(chunks) == 1 and chunks[0].images == self.request.images):
            return chunks
        try:
            self._trace(chunks)
            start = first
            for chunk in chunks:
                self._match(chunk, start)
                start += chunk.images
        except NothingToSplitError:
            return [self.request]
        except CannotSplitError as error:
            raise UsageError(
                f"{self.request.images} images cannot be generated in {len(chunks)} calls with the same noise as in "
                f"one call: {error}",
                hint=SPLIT_HINT,
            ) from error
        return chunks

    def _find_obstacle(self) -> str:
        """Return why the images cannot be generated in several calls; empty if they can.

        With the option `images_per_call`, the user has stated that code of theirs does not mix the images.
        """
        if find_options(self.pipe).images_per_call is None:
            kind = plain_class(self.pipe)
            if kind.__module__.partition(".")[0] != "diffusers":
                return f"{kind.__name__} is not a class of diffusers, so the images of a call may depend on one another"
            if any(has_custom_processors(model) for model in find_models(self.pipe).values()):
                return "custom attention processors may combine the images of a call"
        return find_split_obstacle(self.request)

    def _trace(self, chunks: list[CallRequest]) -> None:
        new = {_size(chunk): chunk for chunk in chunks if _size(chunk) not in self.chunks}
        if new:
            self.batch, *traced = trace_draws(self.pipe, [self.request, *new.values()], self.traced)
            self.chunks |= dict(zip(new, traced, strict=True))

    def _match(self, chunk: CallRequest, first: int) -> BatchSliceNoise:
        assert self.batch is not None
        draws = match_draws(self.batch, self.chunks[_size(chunk)], first)
        return BatchSliceNoise(draws, self._copy_first_generator() if first else None)

    def _copy_first_generator(self) -> torch.Generator | None:
        """Return a copy of the first generator of a list, in its state at the start of the request."""
        if not self.is_list:
            return None
        generator, state = self.states[0]
        copied = torch.Generator(generator.device)
        copied.set_state(state)
        return copied

    def _reset(self, first: int, images: int) -> None:
        # With seeds, no draw of the pipeline uses another generator.
        if not self.request.seeds:
            torch.default_generator.set_state(self.default_state)
        per_image = self.is_list and len(self.states) == self.request.images
        for generator, state in self.states[first : first + images] if per_image else self.states:
            generator.set_state(state)

    def make_start(self, first: int, images: int) -> StartNoise:
        """Return a function that resets the generators and returns part of a request with its noise source.

        The part consists of `images` images of the request, starting at image `first`.
        """

        def start_noise(chunk: CallRequest) -> tuple[CallRequest, NoiseSource]:
            self._reset(first, images)
            if chunk.seeds:
                generators = make_generators(chunk.seeds)
                if "generator" in chunk.accepts:
                    chunk = chunk.with_arguments(generator=generators if len(generators) > 1 else generators[0])
                return chunk, PerImageNoise(generators)
            return chunk, NoiseSource() if images == self.request.images else self._match(chunk, first)

        return start_noise


def _size(chunk: CallRequest) -> tuple[int, int]:
    return chunk.prompts, chunk.per_prompt

"""Generators of one request, which is run again after some failures."""

from __future__ import annotations

import torch

from anyaccel.runtime.call_request import CallRequest
from anyaccel.runtime.workarounds.noise import NoiseSource, PerImageNoise, make_generators

__all__ = ["RequestNoise"]


class RequestNoise:
    """The generators of a request, with their states when the request started."""

    def __init__(self, request: CallRequest) -> None:
        passed = request.arguments.get("generator")
        generators = list(passed) if isinstance(passed, list | tuple) else [passed]
        self.states = [
            (generator, generator.get_state()) for generator in generators if isinstance(generator, torch.Generator)
        ]
        # With seeds, no draw of the pipeline uses another generator.
        if not request.seeds:
            self.states.append((torch.default_generator, torch.default_generator.get_state()))
        self._has_run = False

    def rewind(self) -> None:
        """Reset all generators to their states at the start of the request."""
        for generator, state in self.states:
            generator.set_state(state)

    def start(self, request: CallRequest) -> tuple[CallRequest, NoiseSource]:
        """Return a request with generators for its seeds, and its noise source; reset the generators before a rerun."""
        if self._has_run:  # not before the first run: other threads may draw from the default generator
            self.rewind()
        self._has_run = True
        if not request.seeds:
            return request, NoiseSource()
        generators = make_generators(request.seeds)
        if "generator" in request.accepts:
            request = request.with_arguments(generator=generators if len(generators) > 1 else generators[0])
        return request, PerImageNoise(generators)

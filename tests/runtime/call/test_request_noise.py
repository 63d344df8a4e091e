"""Generators of a request: reset before a rerun, and not before the first run."""

import torch

from anyaccel.runtime.call.request_noise import RequestNoise
from anyaccel.runtime.call_request import CallRequest


def test_generators_are_reset_only_before_a_rerun() -> None:
    own = torch.Generator().manual_seed(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        expected = torch.rand(3)
        torch.manual_seed(0)
        request = CallRequest({"generator": own}, 1, 1, frozenset(("generator",)))
        noise = RequestNoise(request)
        drawn = [torch.rand(1)]  # by another thread
        noise.start(request)
        drawn += [torch.rand(1), torch.rand(1)]
        assert torch.equal(torch.cat(drawn), expected)

        first = torch.rand(1, generator=own)
        noise.start(request)
        assert torch.equal(torch.rand(1, generator=own), first)
        assert torch.equal(torch.rand(1), expected[:1])

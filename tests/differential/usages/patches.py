"""Usages with hooks and patched functions."""

from __future__ import annotations

import functools
from typing import Any

import diffusers
import torch

from tests.differential.session import Session, twice, usage

GROUP = "hooks and patches"


@usage(GROUP)
def forward_hook(session: Session) -> Any:
    """`register_forward_hook` that changes the output."""

    def edit(pipe: Any) -> None:
        pipe.unet.conv_out.register_forward_hook(lambda module, args, output: output * 0.9)

    return twice(session, edit)


@usage(GROUP)
def forward_pre_hook(session: Session) -> Any:
    """`register_forward_pre_hook` with keyword arguments on the UNet."""

    def hook(module: Any, args: Any, kwargs: Any) -> Any:
        return (args[0] * 0.9, *args[1:]), kwargs

    return twice(session, lambda pipe: pipe.unet.register_forward_pre_hook(hook, with_kwargs=True))


@usage(GROUP)
def hook_removed(session: Session) -> Any:
    """A hook that is removed again."""
    pipe = session.make()
    handle = pipe.unet.conv_out.register_forward_hook(lambda module, args, output: output * 0.9)
    hooked = session.run(pipe)
    handle.remove()
    return {"hooked": hooked, "removed": session.run(pipe)}


@usage(GROUP)
def hook_counts_calls(session: Session) -> Any:
    """A hook that only counts calls and records shapes."""
    pipe = session.make()
    shapes: list[str] = []
    pipe.unet.register_forward_hook(lambda module, args, output: shapes.append(str(tuple(args[0].shape))))
    result = session.run(pipe)
    return {"result": result, "shapes": tuple(shapes)}


@usage(GROUP)
def global_forward_hook(session: Session) -> Any:
    """A hook on all modules of the process."""
    pipe = session.make()
    calls = []
    handle = torch.nn.modules.module.register_module_forward_hook(lambda module, args, output: calls.append(1))
    try:
        result = session.run(pipe)
    finally:
        handle.remove()
    return {"result": result, "calls": len(calls)}


@usage(GROUP)
def forward_patched_on_instance(session: Session) -> Any:
    """`module.forward = function`."""

    def edit(pipe: Any) -> None:
        original = pipe.unet.conv_out.forward
        pipe.unet.conv_out.forward = lambda *args, **kwargs: original(*args, **kwargs) * 0.9

    return twice(session, edit)


@usage(GROUP)
def model_forward_patched_on_instance(session: Session) -> Any:
    """`unet.forward = function` on a placed model."""

    def edit(pipe: Any) -> None:
        original = pipe.unet.forward

        def forward(sample: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return original(sample * 0.9, *args, **kwargs)

        pipe.unet.forward = forward

    return twice(session, edit)


@usage(GROUP)
def method_patched_on_class(session: Session) -> Any:
    """A method of the pipeline's diffusers class patched after placing."""
    kind = diffusers.StableDiffusionPipeline
    original = kind.encode_prompt
    try:

        def edit(pipe: Any) -> None:
            def encode_prompt(self: Any, *args: Any, **kwargs: Any) -> Any:
                positive, negative = original(self, *args, **kwargs)
                return positive * 0.5, negative

            kind.encode_prompt = encode_prompt

        return twice(session, edit)
    finally:
        kind.encode_prompt = original


@usage(GROUP)
def call_patched_on_class(session: Session) -> Any:
    """`__call__` of the pipeline's diffusers class patched after placing."""
    kind = diffusers.StableDiffusionPipeline
    original = kind.__call__
    try:

        def edit(pipe: Any) -> None:
            @functools.wraps(original)
            def call(self: Any, *args: Any, **kwargs: Any) -> Any:
                kwargs["guidance_scale"] = 2.0
                return original(self, *args, **kwargs)

            kind.__call__ = call

        return twice(session, edit)
    finally:
        kind.__call__ = original


@usage(GROUP)
def functional_patched(session: Session) -> Any:
    """`torch.nn.functional.silu` patched between calls."""
    original = torch.nn.functional.silu
    try:

        def edit(pipe: Any) -> None:
            torch.nn.functional.silu = lambda value, inplace=False: original(value) * 0.9  # type: ignore[assignment]

        return twice(session, edit)
    finally:
        torch.nn.functional.silu = original

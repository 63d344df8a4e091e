"""Usages with hooks and patched functions."""

from __future__ import annotations

import functools
import sys
import types
from typing import Any

import diffusers
import torch

from tests.differential.session import Session, twice, usage

GROUP = "hooks and patches"


ALL_REQUESTS = {
    "served": "a hook or processor sees the model calls of all requests",
    "cuda-captured": "a hook or processor sees the earlier calls too",
}


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


@usage(GROUP, skip=ALL_REQUESTS)
def hook_counts_calls(session: Session) -> Any:
    """A hook that only counts calls and records shapes."""
    pipe = session.make()
    shapes: list[str] = []
    pipe.unet.register_forward_hook(lambda module, args, output: shapes.append(str(tuple(args[0].shape))))
    result = session.run(pipe)
    return {"result": result, "shapes": tuple(shapes)}


@usage(GROUP, skip=ALL_REQUESTS)
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


def patched(name: str, document: str, patch: Any, recipe: str = "stable-diffusion") -> None:
    """Register a usage that patches a pipeline object between two calls."""

    def run(session: Session) -> Any:
        pipe = session.make(recipe)
        first = session.run(pipe, recipe)
        patch(pipe)
        return {"before": first, "after": session.run(pipe, recipe)}

    run.__name__, run.__doc__ = name, document
    usage(GROUP)(run)


def wrap(owner: Any, name: str, change: Any) -> None:
    """Replace a method of an object by one that changes the result."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return change(original(*args, **kwargs))

    setattr(owner, name, wrapper)


class Uppercase:
    """Tokenizer of the user that wraps another one."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def __call__(self, text: Any, *args: Any, **kwargs: Any) -> Any:
        """Tokenize the reversed text."""
        reversed_text = text[::-1] if isinstance(text, str) else [line[::-1] for line in text]
        return self.tokenizer(reversed_text, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "tokenizer":  # not set yet: the wrapper is being copied
            raise AttributeError(name)
        return getattr(self.tokenizer, name)


patched("prepare_latents_patched", "`pipe.prepare_latents = wrapper` on the pipeline object.",
        lambda pipe: wrap(pipe, "prepare_latents", lambda latents: latents * 0.5))  # fmt: skip
patched("encode_prompt_patched", "`pipe.encode_prompt = wrapper` on the pipeline object.",
        lambda pipe: wrap(pipe, "encode_prompt", lambda pair: (pair[0] * 0.5, pair[1])))  # fmt: skip
patched("vae_decode_patched", "`pipe.vae.decode = wrapper`.",
        lambda pipe: wrap(pipe.vae, "decode", lambda pair: (pair[0] * 0.5,)))  # fmt: skip
patched("image_processor_patched", "`pipe.image_processor.postprocess = wrapper`.",
        lambda pipe: wrap(pipe.image_processor, "postprocess", lambda images: images * 0.5))  # fmt: skip
patched("tokenizer_patched", "`pipe.tokenizer = wrapper`, where the wrapper changes the prompt.",
        lambda pipe: setattr(pipe, "tokenizer", Uppercase(pipe.tokenizer)))  # fmt: skip


@usage(GROUP)
def forward_replaced_by_a_method(session: Session) -> Any:
    """`unet.forward = types.MethodType(function, unet)`, as DeepCache-like packages do."""

    def forward(self: Any, sample: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return type(self).forward(self, sample * 0.9, *args, **kwargs)

    return twice(session, lambda pipe: setattr(pipe.unet, "forward", types.MethodType(forward, pipe.unet)))


@usage(GROUP, skip=ALL_REQUESTS)
def attention_maps_recorded(session: Session) -> Any:
    """Attention processors that record attention maps, as in prompt-to-prompt."""
    maps: list[torch.Tensor] = []

    class Processor:
        def __call__(self, attn: Any, hidden_states: Any, encoder_hidden_states: Any = None, **_: Any) -> Any:
            context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
            query, key = (attn.head_to_batch_dim(layer(x)) for layer, x in
                          ((attn.to_q, hidden_states), (attn.to_k, context)))  # fmt: skip
            probabilities = attn.get_attention_scores(query, key)
            maps.append(probabilities.amax(-1).mean().detach().cpu())  # the mean of all is constant
            value = attn.head_to_batch_dim(attn.to_v(context))
            output = attn.batch_to_head_dim(torch.bmm(probabilities, value))
            return attn.to_out[1](attn.to_out[0](output))

    pipe = session.make()
    for name, module in pipe.unet.named_modules():
        if name.endswith("attn2"):
            module.set_processor(Processor())
    result = session.run(pipe)
    return {"result": result, "maps": torch.stack(maps), "count": len(maps)}


@usage(GROUP)
def processor_class_patched(session: Session) -> Any:
    """`AttnProcessor2_0.__call__` patched on the class after placing."""
    kind = diffusers.models.attention_processor.AttnProcessor2_0
    original = kind.__call__
    try:

        def edit(pipe: Any) -> None:
            kind.__call__ = lambda self, *args, **kwargs: original(self, *args, **kwargs) * 0.9

        return twice(session, edit)
    finally:
        kind.__call__ = original


@usage(GROUP)
def model_class_patched(session: Session) -> Any:
    """`UNet2DConditionModel.forward` patched on the class after placing."""
    kind = diffusers.UNet2DConditionModel
    original = kind.forward
    try:

        def edit(pipe: Any) -> None:
            @functools.wraps(original)
            def forward(self: Any, sample: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
                return original(self, sample * 0.9, *args, **kwargs)

            kind.forward = forward

        return twice(session, edit)
    finally:
        kind.forward = original


@usage(GROUP)
def attention_function_patched(session: Session) -> Any:
    """`torch.nn.functional.scaled_dot_product_attention` patched between calls."""
    original = torch.nn.functional.scaled_dot_product_attention
    try:

        def edit(pipe: Any) -> None:
            torch.nn.functional.scaled_dot_product_attention = (  # type: ignore[assignment]
                lambda *args, **kwargs: original(*args, **kwargs) * 0.9
            )

        return twice(session, edit)
    finally:
        torch.nn.functional.scaled_dot_product_attention = original  # type: ignore[assignment]


@usage(GROUP)
def randn_tensor_patched(session: Session) -> Any:
    """`randn_tensor` patched in the pipeline's module."""
    module = sys.modules[diffusers.StableDiffusionPipeline.__module__]
    original = module.randn_tensor
    try:

        def edit(pipe: Any) -> None:
            module.randn_tensor = lambda *args, **kwargs: original(*args, **kwargs) * 0.5

        return twice(session, edit)
    finally:
        module.randn_tensor = original


def by_timestep(name: str, document: str, edit: Any) -> None:
    """Register a usage that replaces code which reads the timestep."""

    def run(session: Session) -> Any:
        torch.manual_seed(0)
        return twice(session, edit)

    run.__name__, run.__doc__ = name, document
    usage(GROUP)(run)


class TimeTable(torch.nn.Module):
    """Learned embeddings of timesteps."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(1001, width)

    def forward(self, timestep: Any) -> Any:
        """Look up a timestep."""
        return self.table(timestep)


def embed_timesteps(pipe: Any) -> None:
    """Replace the time embedding."""
    pipe.unet.time_proj = TimeTable(pipe.unet.time_proj.num_channels).to(pipe.device)


def weight_by_index(pipe: Any) -> None:
    """Scale the input by a weight that the timestep selects."""
    forward, weights = pipe.unet.forward, torch.linspace(1, 2, 1001)
    pipe.unet.forward = lambda x, t, *args, **kwargs: forward(x * weights.to(x.device)[t], t, *args, **kwargs)


def weight_by_text(pipe: Any) -> None:
    """Scale the input by a weight with the timestep as text."""
    forward, weights = pipe.unet.forward, {"501": 3.0, "1": 2.0}
    pipe.unet.forward = lambda x, t, *args, **kwargs: forward(x * weights.get(str(t.item()), 1.0), t, *args, **kwargs)


by_timestep("timesteps_embedded_by_a_table", "`unet.time_proj` replaced by a learned embedding.", embed_timesteps)
by_timestep(
    "forward_indexes_with_the_timestep", "A replaced `forward` that indexes with the timestep.", weight_by_index
)
by_timestep("forward_reads_the_timestep_as_text", "A replaced `forward` that looks up `str(t.item())`.", weight_by_text)


@usage(GROUP)
def forward_of_another_pipeline(session: Session) -> Any:
    """`model.forward = other.forward`, where both models are placed."""
    pipe, other = session.make(), session.make()
    with torch.no_grad():
        other.unet.conv_out.weight.mul_(1.5)
    pipe.unet.forward = other.unet.forward
    return session.run(pipe)


@usage(GROUP)
def activation_replaced_by_a_function(session: Session) -> Any:
    """An activation that is replaced by a function, which mixes the images of a batch; two images."""
    pipe = session.make()
    resnet = pipe.unet.mid_block.resnets[0]
    del resnet.nonlinearity
    resnet.nonlinearity = lambda value: torch.nn.functional.silu(value) + 0.1 * value.mean(0, keepdim=True)
    return session.run(pipe, num_images_per_prompt=2)


@usage(GROUP)
def module_of_diffusers_replaced(session: Session) -> Any:
    """`diffusers.models.attention_processor.F` replaced by an object that mixes the images of a batch; two images."""
    module: Any = diffusers.models.attention_processor
    functional = module.F

    class Functional:
        def __getattr__(self, name: str) -> Any:
            return getattr(functional, name)

        def scaled_dot_product_attention(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            result: torch.Tensor = functional.scaled_dot_product_attention(*args, **kwargs)
            return result + 0.1 * result.mean(0, keepdim=True)

    pipe = session.make()
    try:
        module.F = Functional()
        return session.run(pipe, num_images_per_prompt=2)
    finally:
        module.F = functional

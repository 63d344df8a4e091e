"""Usages that change weights or train between calls."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.training_utils import EMAModel
from torch.nn.utils import parametrizations, parametrize

from tests.differential.session import Session, twice, usage

GROUP = "weights and training"


@usage(GROUP)
def weight_data_multiplied(session: Session) -> Any:
    """`weight.data.mul_(…)` between calls."""
    return twice(session, lambda pipe: pipe.unet.conv_in.weight.data.mul_(1.5))


@usage(GROUP)
def weight_data_replaced(session: Session) -> Any:
    """`weight.data = …` between calls."""

    def edit(pipe: Any) -> None:
        pipe.unet.conv_in.weight.data = pipe.unet.conv_in.weight.data * 1.5

    return twice(session, edit)


@usage(GROUP)
def weight_copied_in_place(session: Session) -> Any:
    """`weight.copy_(…)` under `torch.no_grad()`."""

    def edit(pipe: Any) -> None:
        with torch.no_grad():
            pipe.unet.conv_out.weight.copy_(pipe.unet.conv_out.weight * 0.5)

    return twice(session, edit)


@usage(GROUP)
def parameter_replaced(session: Session) -> Any:
    """`module.weight = torch.nn.Parameter(…)`."""

    def edit(pipe: Any) -> None:
        layer = pipe.unet.conv_in
        layer.weight = torch.nn.Parameter(layer.weight.detach() * 2)

    return twice(session, edit)


@usage(GROUP)
def vae_weight_edited(session: Session) -> Any:
    """An edit of a decoder weight."""
    return twice(session, lambda pipe: pipe.vae.decoder.conv_out.weight.data.mul_(0.5))


@usage(GROUP)
def text_encoder_weight_edited(session: Session) -> Any:
    """An edit of a text encoder weight."""

    def edit(pipe: Any) -> None:
        next(pipe.text_encoder.parameters()).data.mul_(1.3)

    return twice(session, edit)


@usage(GROUP)
def buffer_edited(session: Session) -> Any:
    """An edit of a buffer."""

    def edit(pipe: Any) -> None:
        for module in pipe.text_encoder.modules():
            if "position_ids" in module._buffers:
                module.position_ids.copy_(module.position_ids.flip(-1))

    return twice(session, edit)


@usage(GROUP)
def state_dict_loaded(session: Session) -> Any:
    """`load_state_dict` with changed weights."""

    def edit(pipe: Any) -> None:
        state = {name: value * 1.1 for name, value in pipe.unet.state_dict().items()}
        pipe.unet.load_state_dict(state)

    return twice(session, edit)


@usage(GROUP)
def state_dict_assigned(session: Session) -> Any:
    """`load_state_dict(…, assign=True)`."""

    def edit(pipe: Any) -> None:
        state = {name: value.clone() * 1.1 for name, value in pipe.unet.state_dict().items()}
        pipe.unet.load_state_dict(state, assign=True)

    return twice(session, edit)


@usage(GROUP)
def state_dict_edited(session: Session) -> Any:
    """In-place edits of the tensors that `state_dict()` returned earlier."""
    pipe = session.make()
    state = pipe.unet.state_dict()
    first = session.run(pipe)
    with torch.no_grad():
        state["conv_in.weight"].mul_(1.5)
    return {"before": first, "after": session.run(pipe)}


@usage(GROUP)
def ema_swapped(session: Session) -> Any:
    """`EMAModel.store`, `copy_to` and `restore`."""
    pipe = session.make()
    ema = EMAModel(pipe.unet.parameters(), decay=0.5)
    ema.to(pipe.device)
    with torch.no_grad():
        for weight in pipe.unet.parameters():
            weight.mul_(1.1)
    ema.step(pipe.unet.parameters())
    ema.store(pipe.unet.parameters())
    ema.copy_to(pipe.unet.parameters())
    averaged = session.run(pipe)
    ema.restore(pipe.unet.parameters())
    return {"averaged": averaged, "restored": session.run(pipe)}


@usage(GROUP)
def weight_swapped_by_parametrize(session: Session) -> Any:
    """`torch.nn.utils.parametrize` on a layer."""

    class Scale(torch.nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight * 1.5

    return twice(session, lambda pipe: parametrize.register_parametrization(pipe.unet.conv_in, "weight", Scale()))


@usage(GROUP)
def weight_norm_added(session: Session) -> Any:
    """`weight_norm` on a layer."""
    return twice(session, lambda pipe: parametrizations.weight_norm(pipe.unet.conv_in))


# The compiled UNet stores its weights in channels-last format.
@usage(GROUP, rejected={"cuda-captured": "view size is not compatible"})
def parameters_flattened(session: Session) -> Any:
    """`parameters_to_vector` and `vector_to_parameters`."""

    def edit(pipe: Any) -> None:
        vector = torch.nn.utils.parameters_to_vector(pipe.unet.parameters())
        torch.nn.utils.vector_to_parameters(vector * 1.1, pipe.unet.parameters())

    return twice(session, edit)


def train_step(pipe: Any) -> float:
    """Run one optimizer step on the UNet and return the loss."""
    pipe.unet.train()
    optimizer = torch.optim.SGD(pipe.unet.parameters(), lr=1e-3)
    weight = pipe.unet.conv_in.weight
    generator = torch.Generator().manual_seed(3)
    latents = torch.randn(1, 4, 8, 8, generator=generator).to(weight.device)
    states = torch.randn(1, 7, pipe.text_encoder.config.hidden_size, generator=generator).to(weight.device)
    output = pipe.unet(latents, torch.tensor([10], device=weight.device), encoder_hidden_states=states).sample
    loss = output.pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    pipe.unet.eval()
    return float(loss)


@usage(GROUP)
def training_step_between_calls(session: Session) -> Any:
    """One optimizer step between two calls."""
    pipe = session.make()
    first = session.run(pipe)
    loss = train_step(pipe)
    return {"before": first, "loss": loss, "after": session.run(pipe)}


@usage(GROUP)
def training_step_before_the_first_call(session: Session) -> Any:
    """One optimizer step before the first call."""
    pipe = session.make()
    return {"loss": train_step(pipe), "result": session.run(pipe)}


@usage(GROUP)
def training_after_inference_mode(session: Session) -> Any:
    """A call under `torch.inference_mode()`, then a training step."""
    pipe = session.make()
    with torch.inference_mode():
        first = session.run(pipe)
    return {"before": first, "loss": train_step(pipe), "after": session.run(pipe)}


@usage(GROUP)
def requires_grad_disabled(session: Session) -> Any:
    """`requires_grad_(False)` on a model."""
    return twice(session, lambda pipe: pipe.unet.requires_grad_(False))


@usage(
    GROUP,
    skip={
        "mps": "dropout draws on the device",
        "served": "dropout draws for all requests of a batch",
    },
)  # fmt: skip
def train_mode_with_dropout(session: Session) -> Any:
    """`model.train()` with dropout, seeded globally."""

    def edit(pipe: Any) -> None:
        pipe.unet.down_blocks[0].resnets[0].dropout.p = 0.5
        pipe.unet.train()
        torch.manual_seed(5)

    return twice(session, edit)

"""A pipeline outside of diffusers: a module and a scheduler of the user, an optional component, its own `__call__`."""

from typing import Any

import diffusers
import numpy
import torch
from diffusers import configuration_utils

from anyaccel.recipes import recipes

__all__ = ["CurvedScheduler", "OwnPipeline", "Shift", "call", "make"]

# diffusers finds the base classes of components by these names in their module.
LIBRARY: Any = diffusers
DiffusionPipeline: Any = LIBRARY.DiffusionPipeline
ModelMixin: Any = LIBRARY.ModelMixin
SchedulerMixin: Any = LIBRARY.SchedulerMixin
ConfigMixin: Any = configuration_utils.ConfigMixin
register_to_config: Any = configuration_utils.register_to_config


class Shift(ModelMixin, ConfigMixin):  # type: ignore[misc]
    """A small model of the user that can be saved."""

    config_name = "config.json"

    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.linspace(0.8, 1.2, channels))

    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        """Scale each channel."""
        return latents * self.scale[None, :, None, None]


class CurvedScheduler(SchedulerMixin, ConfigMixin):  # type: ignore[misc]
    """A scheduler of the user, whose schedule is computed in float64."""

    order = 1

    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(self, exponent: float = 2.0) -> None:
        self.timesteps = torch.zeros(0)
        self.init_noise_sigma = 1.0

    def set_timesteps(self, count: int, device: Any = None) -> None:
        """Set the timesteps, on the device of the caller."""
        curve = numpy.linspace(1.0, 0.0, count + 1) ** self.config.exponent
        self.sigmas = torch.from_numpy(curve).to(device)
        self.timesteps = torch.from_numpy(curve[:-1] * 999).to(device)

    def step(self, output: torch.Tensor, index: int, sample: torch.Tensor) -> torch.Tensor:
        """Return the sample of the next step."""
        return sample + (self.sigmas[index + 1] - self.sigmas[index]).to(sample.dtype) * output


class OwnPipeline(DiffusionPipeline):  # type: ignore[misc]
    """Draws an image with arguments that no pipeline of diffusers has."""

    model_cpu_offload_seq = "text_encoder->unet->shift->vae"
    _optional_components = ["refiner"]  # noqa: RUF012 - the name and type that diffusers reads

    def __init__(
        self, unet: Any, vae: Any, tokenizer: Any, text_encoder: Any, scheduler: Any, shift: Any, refiner: Any = None
    ) -> None:
        super().__init__()
        self.register_modules(
            unet=unet, vae=vae, tokenizer=tokenizer, text_encoder=text_encoder, scheduler=scheduler, shift=shift,
            refiner=refiner,
        )  # fmt: skip

    @torch.no_grad()
    def __call__(self, caption: str, steps: int = 2, noise: Any = None, generator: Any = None) -> Any:
        """Return the image as an array."""
        device = self._execution_device
        tokens = self.tokenizer(caption, padding="max_length", max_length=8, return_tensors="pt", truncation=True)
        states = self.text_encoder(tokens.input_ids.to(device))[0]
        if noise is None:
            shape = (1, self.unet.config.in_channels, 8, 8)
            noise = torch.randn(shape, generator=generator, device=generator.device, dtype=self.unet.dtype)
        latents = noise.to(device)
        self.scheduler.set_timesteps(steps, device=device)
        for index, timestep in enumerate(self.progress_bar(self.scheduler.timesteps)):
            output = self.unet(latents, timestep, encoder_hidden_states=states, return_dict=False)[0]
            latents = self.scheduler.step(output, index, latents)
        latents = self.shift(latents)
        if self.refiner is not None:
            latents = self.refiner(latents)
        image = self.vae.decode(latents / self.vae.config.scaling_factor, return_dict=False)[0]
        self.maybe_free_model_hooks()
        return image.float().cpu().permute(0, 2, 3, 1).numpy()


def make(**more: Any) -> Any:
    """Return the pipeline with tiny components, without the optional one."""
    tiny: Any = recipes()["stable-diffusion"].make()
    parts = {name: getattr(tiny, name) for name in ("unet", "vae", "tokenizer", "text_encoder")}
    channels = tiny.unet.config.in_channels
    pipe = OwnPipeline(**parts, scheduler=CurvedScheduler(), shift=Shift(channels), **more)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def call(pipe: Any) -> Any:
    """Call the pipeline with a seed."""
    return pipe("a fox", steps=3, generator=torch.Generator().manual_seed(3))

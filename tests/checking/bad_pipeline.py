"""Pipeline with deliberate faults: each marked line hits one limit of some devices."""

from typing import Any

import diffusers as plain
import torch

diffusers: Any = plain  # not fully typed
__all__ = ["FAULTS", "BadPipeline", "make"]


class BadModel(diffusers.ModelMixin, diffusers.ConfigMixin):  # type: ignore[misc]
    """Rotary table in float64, and one synchronization per layer."""

    @diffusers.configuration_utils.register_to_config  # type: ignore[untyped-decorator]
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(width, width)

    def forward(self, latents: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        table = torch.arange(8, dtype=torch.float64, device=latents.device)  # fault: float64
        angle = (table * 0.1).to(latents.dtype)
        out: torch.Tensor = self.layer(latents * torch.cos(angle))
        if out.abs().max().item() > 1e6:  # fault: round trip
            raise ValueError
        return out + timestep.to(latents.dtype) * 1e-4


class BadPipeline(diffusers.DiffusionPipeline):  # type: ignore[misc]
    """Noise on the device, a timestep lookup on the device, and a tensor that is too large."""

    def __init__(self, model: BadModel, scheduler: Any) -> None:
        super().__init__()
        self.register_modules(model=model, scheduler=scheduler)

    @torch.no_grad()
    def __call__(self, num_inference_steps: int = 2, output_type: str = "np") -> Any:
        device = self._execution_device
        torch.manual_seed(0)
        noise = torch.randn(1, 8, device=device)  # fault: random
        latents = noise * 0 + torch.linspace(-1, 1, 8).to(device)
        self.scheduler.set_timesteps(num_inference_steps, device=device)
        timesteps = self.scheduler.timesteps
        allowed = torch.empty(2**32 + 8, dtype=torch.bool, device=device)  # fault: size
        for i, t in enumerate(timesteps):
            index = (timesteps == t).nonzero()  # fault: shape
            step = torch.full((1,), i, dtype=torch.int64, device=device)  # fault: int64
            latents = latents - 0.1 * self.model(latents, timesteps[index].reshape(-1)[0] + 0 * step)
        assert allowed.numel() > 2**32
        return diffusers.ImagePipelineOutput(images=latents.float().cpu().numpy())


FAULTS = {
    "float64": "dtypes.float64",
    "random": "random_numbers",
    "shape": "data_dependent_shapes",
    "int64": "dtypes.int64",
    "size": "largest_tensor.tensor",
    "round trip": "host_round_trip",
}


def make() -> Any:
    """Return the pipeline for `anyaccel check`."""
    torch.manual_seed(1)
    return BadPipeline(BadModel().eval(), diffusers.DDIMScheduler())

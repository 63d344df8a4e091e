"""A small pipeline with lines that an MPS device rejects; `v0_1/check/report.json` quotes them, so keep the text."""

from typing import Any

import diffusers as plain
import torch

diffusers: Any = plain  # without types
__all__ = ["UnportablePipeline", "make"]


class SmallModel(diffusers.ModelMixin, diffusers.ConfigMixin):  # type: ignore[misc]
    """One linear layer with a table in float64."""

    @diffusers.configuration_utils.register_to_config  # type: ignore[untyped-decorator]
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(width, width)

    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        table = torch.arange(8, dtype=torch.float64, device=latents.device)
        out: torch.Tensor = self.layer(latents * torch.cos(table * 0.1).to(latents.dtype))
        return out


class UnportablePipeline(diffusers.DiffusionPipeline):  # type: ignore[misc]
    """Two steps without a scheduler."""

    def __init__(self, model: SmallModel) -> None:
        super().__init__()
        self.register_modules(model=model)

    @torch.no_grad()
    def __call__(self, num_inference_steps: int = 2, output_type: str = "np") -> Any:
        device = self._execution_device
        latents = torch.linspace(-1, 1, 8).reshape(1, 8).to(device)
        weights = torch.linspace(0, 1, 8, dtype=torch.float64, device=device)
        for _ in range(num_inference_steps):
            latents = latents - 0.1 * self.model(latents) * weights.to(latents.dtype)
        return diffusers.ImagePipelineOutput(images=latents.float().cpu().numpy())


def make() -> UnportablePipeline:
    """Return the pipeline, always with the same weights."""
    torch.manual_seed(0)
    return UnportablePipeline(SmallModel())

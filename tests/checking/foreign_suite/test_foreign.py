"""Tests of diffusers that do not use anyaccel."""

import os

import torch
from diffusers import DDIMScheduler, UNet2DModel

DEVICE = os.environ.get("DIFFUSERS_TEST_DEVICE", "cpu")


def make_model():
    torch.manual_seed(0)
    return UNet2DModel(
        sample_size=8,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=4,
    ).eval()


def test_the_output_has_the_size_of_the_input():
    model = make_model().to(DEVICE)
    sample = torch.ones(1, 3, 8, 8).to(DEVICE)
    with torch.no_grad():
        assert model(sample, 5).sample.shape == sample.shape
    assert next(model.parameters()).device.type == torch.device(DEVICE).type


def test_the_schedule_is_in_float64():
    scheduler = DDIMScheduler()
    scheduler.set_timesteps(4)
    weights = scheduler.alphas_cumprod.double().to(DEVICE)  # not supported on every device
    assert weights.shape == (1000,)

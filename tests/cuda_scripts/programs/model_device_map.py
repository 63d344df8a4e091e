"""A transformers text encoder and a denoiser, each with its own `device_map`."""

import sys

import numpy as np
import torch
from diffusers import UNet2DConditionModel
from transformers import CLIPTextModel, CLIPTokenizer

models, output = sys.argv[1:3]
folder = f"{models}/stable-diffusion"

tokenizer = CLIPTokenizer.from_pretrained(folder, subfolder="tokenizer")
text_encoder = CLIPTextModel.from_pretrained(folder, subfolder="text_encoder", device_map="auto")
unet = UNet2DConditionModel.from_pretrained(folder, subfolder="unet", device_map={"": 0})

inputs = tokenizer("a red fox", padding="max_length", max_length=77, return_tensors="pt").to("cuda")
with torch.no_grad():
    states = text_encoder(inputs.input_ids).last_hidden_state
    sample = torch.linspace(-1, 1, 256, device=0).reshape(1, 4, 8, 8)
    result = unet(sample, 10, encoder_hidden_states=states).sample
np.save(f"{output}/result.npy", result.cpu().numpy())

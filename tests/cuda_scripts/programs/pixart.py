"""PixArt with a text encoder that is loaded and run separately."""

import gc
import sys

import torch
from diffusers import PixArtSigmaPipeline

models, output = sys.argv[1:3]
device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")

pipe = PixArtSigmaPipeline.from_pretrained(f"{models}/pixart-sigma", transformer=None, torch_dtype=torch.float32)
pipe.to(device)
with torch.no_grad():
    embeds = pipe.encode_prompt("cute cat", max_sequence_length=32)
prompt_embeds, prompt_attention_mask, negative_embeds, negative_prompt_attention_mask = embeds
del pipe
gc.collect()
torch.cuda.empty_cache()

pipe = PixArtSigmaPipeline.from_pretrained(f"{models}/pixart-sigma", text_encoder=None, torch_dtype=torch.float32)
pipe = pipe.to(device)
image = pipe(
    negative_prompt=None,
    prompt_embeds=prompt_embeds,
    negative_prompt_embeds=negative_embeds,
    prompt_attention_mask=prompt_attention_mask,
    negative_prompt_attention_mask=negative_prompt_attention_mask,
    height=16,
    width=16,
    use_resolution_binning=False,
    num_inference_steps=2,
    generator=torch.Generator(device).manual_seed(0),
).images[0]
image.save(f"{output}/cat.png")

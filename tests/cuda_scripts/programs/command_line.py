"""A program with options and a main function."""

import argparse
from pathlib import Path

import torch
from diffusers import StableDiffusionPipeline


def parse_args():
    parser = argparse.ArgumentParser(description="Generate images.")
    parser.add_argument("models", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--prompt", default="a castle")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--half", action="store_true")
    return parser.parse_args()


def main():
    args = parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.float16 if args.half else torch.float32
    pipe = StableDiffusionPipeline.from_pretrained(args.models / "stable-diffusion", torch_dtype=dtype).to(device)
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator(device=device).manual_seed(args.seed)
    image = pipe(args.prompt, num_inference_steps=args.steps, generator=generator).images[0]
    image.save(args.output / "castle.png")


if __name__ == "__main__":
    main()

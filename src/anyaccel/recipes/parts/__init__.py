"""Tiny components shared by recipes: text encoders, tokenizers, autoencoders, call arguments."""

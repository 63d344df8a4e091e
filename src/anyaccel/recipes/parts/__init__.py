"""Tiny components shared by recipes: text encoders, tokenizers, autoencoders and call arguments."""

"""Shared parts of recipes: tiny encoders, tokenizers and autoencoders, and pipeline call arguments."""

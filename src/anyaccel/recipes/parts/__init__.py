"""Tiny components that recipes share: text encoders, tokenizers, autoencoders, call arguments."""

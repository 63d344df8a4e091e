"""Compilation, graph capture, quantization and step skipping."""

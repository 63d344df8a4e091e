"""Quantized weights on devices without kernels for their format.

Layers that diffusers' quantizers created are replaced by layers that keep the weight in its format and dequantize it
for each call, in operations that every device has.
"""

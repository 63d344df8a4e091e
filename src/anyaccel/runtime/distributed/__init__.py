"""One pipeline on several devices: parallel models and split classifier-free guidance."""

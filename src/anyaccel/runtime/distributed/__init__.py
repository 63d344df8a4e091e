"""One pipeline over several devices: parallel models and split classifier-free guidance."""

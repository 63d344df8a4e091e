"""Explaining: will it fit, how and why this way, before a byte of weights is downloaded and without the device."""

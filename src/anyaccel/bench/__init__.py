"""Measuring speed: stock diffusers and anyaccel make the same picture, each in a process of its own, in turns."""

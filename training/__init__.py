"""Training of the embedded model: data, training and evaluation. Run with `python -m training`."""

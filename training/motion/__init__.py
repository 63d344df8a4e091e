"""Training of the embedded model's motion module: moving scenes, training, export and evaluation."""

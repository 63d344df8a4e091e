"""How the embedded model is made: data, loss, schedule, evaluation. `python -m training` says how to run it."""

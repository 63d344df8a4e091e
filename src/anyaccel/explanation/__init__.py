"""`anyaccel.explain`: the plan for a model and whether it fits, without the weights or the device."""

"""`anyaccel.explain`: the plan for a model and whether it fits, without its weights and without the device."""

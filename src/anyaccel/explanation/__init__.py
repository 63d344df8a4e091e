"""`anyaccel.explain`: the plan and memory forecast for a model, without its weights or the device."""

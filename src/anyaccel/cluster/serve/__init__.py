"""`anyaccel serve --ray`: the image generation service, with replicas on a Ray cluster."""

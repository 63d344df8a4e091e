"""`anyaccel serve --ray`: replicas of the service on a Ray cluster."""

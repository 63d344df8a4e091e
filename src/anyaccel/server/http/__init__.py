"""HTTP service: endpoints, request validation, middleware and the web page."""

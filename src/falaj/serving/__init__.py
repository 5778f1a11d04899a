"""Serving: endpoints that route requests to versions of a model."""

"""Serving: endpoints that route requests to model versions, the prediction log and feedback."""

"""Endpoints: the list, and one endpoint with its traffic, canary and a form to try it."""

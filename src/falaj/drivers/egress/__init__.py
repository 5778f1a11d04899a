"""Outgoing HTTP requests, to hosts that falaj.toml allows."""

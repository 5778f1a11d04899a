"""Compose ensembles: resolve their steps, check the types of what flows between them, and pin both."""

"""Secrets: values that jobs get as environment variables and nobody can read back."""

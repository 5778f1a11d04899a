"""The model registry: immutable signed model versions, and aliases with a history."""

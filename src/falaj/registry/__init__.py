"""The registry: signed model versions that never change, and aliases with a history."""

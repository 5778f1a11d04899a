"""Checkpoint storage: parts that are staged, hashed, written and committed atomically, and read on any layout."""

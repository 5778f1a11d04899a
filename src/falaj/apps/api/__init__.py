"""The REST API under /api/v1, generated from the operations."""

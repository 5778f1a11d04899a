"""The HTTP door: REST under /api/v1, made from the operations."""

"""Bytes at rest: authenticated frames, and blobs written through them."""

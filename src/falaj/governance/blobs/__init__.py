"""Blobs: encrypted bytes in a zone, uploaded first and published by one transaction."""

"""Blobs in a local directory or in a bucket, through obstore."""

"""Signatures in the format of OpenSSF model signing: made with its package, verified without it."""

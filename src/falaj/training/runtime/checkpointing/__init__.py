"""Checkpoints, exact resume and the certificate of a run."""

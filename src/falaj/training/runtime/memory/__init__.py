"""Estimates of the memory that a training step takes, found without running it, for one process or several."""

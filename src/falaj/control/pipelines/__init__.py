"""Pipelines: retraining, canaries, optimization, and the triggers that start them."""

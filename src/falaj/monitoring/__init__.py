"""Monitoring: sketches of what models see and answer, and whether it still looks like the training set."""

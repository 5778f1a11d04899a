"""Checkpoints in parts: staged, hashed, written aside, then made visible; read back on any number of processes."""

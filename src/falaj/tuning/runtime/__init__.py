"""Optuna, in a process of its own."""

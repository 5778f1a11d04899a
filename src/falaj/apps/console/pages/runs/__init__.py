"""Runs: the table, one run, and comparisons."""

"""Prints results, messages, progress and errors."""

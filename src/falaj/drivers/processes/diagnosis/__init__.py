"""Finds out why an attempt failed, from its exit status, its log, its heartbeats and its stacks."""

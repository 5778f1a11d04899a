"""Reconciliation of jobs: admission, attempts, their agents, checkpoints, outputs and progress."""

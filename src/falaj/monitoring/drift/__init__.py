"""Drift of a window from its reference: bins, statistical tests and verdicts, without I/O."""

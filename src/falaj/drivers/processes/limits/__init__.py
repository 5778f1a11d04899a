"""Limits of one attempt on memory, processes and disk, and the watchdog that enforces them."""

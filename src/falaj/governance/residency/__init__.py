"""Data residency: the zones, and what may be stored in each."""

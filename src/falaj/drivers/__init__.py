"""Drivers: one folder per technology, one file per port that it implements."""

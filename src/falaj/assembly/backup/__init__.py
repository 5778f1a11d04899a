"""Backups: copy a home while its platform runs, check the copy, and make a home from it again."""

"""Tuning studies: the list, and one study with its trials."""

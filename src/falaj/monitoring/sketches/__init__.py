"""Sketches of columns: built, merged, parsed, and stored encrypted."""

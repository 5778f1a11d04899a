"""Layouts of other systems that versions are exported in: pure functions from records to the texts of files."""

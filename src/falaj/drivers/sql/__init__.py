"""Metadata on SQLite and PostgreSQL, with one schema."""

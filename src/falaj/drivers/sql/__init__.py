"""Metadata on SQLite and PostgreSQL, by one schema."""

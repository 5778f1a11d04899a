"""DuckDB: SQL in this process."""

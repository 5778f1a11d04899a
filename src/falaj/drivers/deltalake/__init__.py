"""Delta Lake tables, by delta-rs."""

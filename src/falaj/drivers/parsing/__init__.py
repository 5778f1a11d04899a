"""Parses what callers sent in processes that hold no key: a warm parent in a sandbox forks one child for each call."""

"""Versions of tables that views and training sets have published, and the files that they consist of."""

"""Rows that come in: converted to the types of their columns, checked by rules, and set aside if they are invalid."""

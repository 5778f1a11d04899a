"""Durable workflows on dbos."""

"""Durable workflows: requested work, the context that their steps run in, and the built-in ones."""

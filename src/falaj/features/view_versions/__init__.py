"""Versions of views: what a new one takes over from the last, and how both are stored."""

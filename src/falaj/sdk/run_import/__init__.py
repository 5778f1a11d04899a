"""Copies runs of other trackers: a source is read here, in the process of the user, and written by operations."""

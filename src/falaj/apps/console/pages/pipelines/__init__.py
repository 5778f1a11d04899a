"""Pages of pipelines: the list, and one with its graph and runs."""

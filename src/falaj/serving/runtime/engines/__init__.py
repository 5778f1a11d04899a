"""One module per engine; each imports its framework, and only the worker process of a model imports it."""

"""How a step gets its micro-batches: read in its own time, or ahead of it by worker processes or a thread."""

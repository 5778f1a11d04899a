"""Data loading: micro-batches read inline, or ahead of the step by worker processes or a thread."""

"""MIG layouts: which slices a GPU can be cut into, and which the queue would need. Pure."""

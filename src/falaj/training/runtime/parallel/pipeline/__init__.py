"""Layers in stages, one after the other over the processes, that work on different micro-batches at the same time."""

"""Lineage: the graph of objects and the operations that made them."""

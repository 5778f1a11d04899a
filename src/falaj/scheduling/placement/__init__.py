"""Placement of jobs on nodes and GPUs with little fragmentation."""

"""LMDB: a memory-mapped store in this process."""

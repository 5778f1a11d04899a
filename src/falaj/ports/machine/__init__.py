"""Ports of one machine: its hardware, the memory that it has for rows, and its boot."""

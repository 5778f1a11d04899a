"""Measures the CPU time, memory and energy that an attempt uses."""

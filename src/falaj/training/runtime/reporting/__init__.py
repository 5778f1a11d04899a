"""Metrics, throughput, run parameters and event files of a run."""

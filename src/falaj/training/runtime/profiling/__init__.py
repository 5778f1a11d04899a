"""Profiles of training steps: the cost of a step, the peaks of a device, and the bottleneck."""

"""Tracking: experiments, their runs, and what was logged to them."""

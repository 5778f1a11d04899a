"""Quantiles of streams in constant memory. Depends on numpy alone, so that services and drivers can use it."""

"""Optimization: make variants of a model by recipe, measure them on the host, and accept or reject them."""

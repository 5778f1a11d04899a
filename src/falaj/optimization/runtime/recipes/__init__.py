"""Recipes: each makes one variant of a model, or says why it cannot."""

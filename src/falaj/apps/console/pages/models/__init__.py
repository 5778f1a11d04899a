"""Pages of models: the list, one model, one version, and the difference of two."""

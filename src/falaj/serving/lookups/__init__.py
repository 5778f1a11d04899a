"""Feature lookup: how a model's input is assembled, computed and imputed for each version."""

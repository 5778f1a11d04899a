"""Plain rows instead of tensors: what people and spreadsheets have."""

"""Training data: sample sources, batch plans, Arrow tables and data loading."""

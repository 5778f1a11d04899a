"""Batch prediction as an operation; what runs is in runtime/batch_prediction."""

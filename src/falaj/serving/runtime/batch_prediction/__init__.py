"""Batch prediction: rows of Parquet files through a model into one Parquet file, resumable after any kill."""

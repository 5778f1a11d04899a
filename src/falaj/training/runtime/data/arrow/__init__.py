"""Arrow tables and Parquet files as tensors. pyarrow is imported here only, on first use."""
